// Default rates: two cores and one mid-range NVMe drive, rounded.
#include "engine/plan/profile.h"

namespace overspill {

HardwareProfile default_profile() {
  HardwareProfile p;
  p[OpKind::read] = {1.7e9, 1e-4};
  p[OpKind::write] = {2.5e9, 1e-4};
  p[OpKind::copy_to_device] = p[OpKind::copy_to_host] = {10e9, 1e-5};
  p[OpKind::forward] = p[OpKind::loss] = p[OpKind::score] = p[OpKind::backward] = {1e11, 1e-5};
  p[OpKind::reduce_gradient] = {4e9, 1e-5};
  p[OpKind::export_gradient] = {2e9, 1e-5};
  p[OpKind::update] = {1e9, 1e-5};
  return p;
}

}  // namespace overspill
