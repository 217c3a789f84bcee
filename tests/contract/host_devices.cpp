// The suites of overspill_tests run on the host.
#include "tests/contract/devices.h"

namespace overspill::test {

bool gpu_under_test() { return false; }

}  // namespace overspill::test
