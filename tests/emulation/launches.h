// What blocks need of the launches: errors and ThreadSanitizer's orderings. Internal to the
// emulation.
#pragma once

#include <string>

namespace overspill::emulation {

void add_error(std::string what);
/// From the launcher to every thread of the kernel; from those to who waits for the kernel.
void* launch_ordering();
void* end_ordering();

}  // namespace overspill::emulation
