// The header in C++11: no exception comes out, and a status says what is wrong.
#include <overspill.h>

#include <cstring>

int main() {
  osp_engine_t engine = nullptr;
  const osp_status_t status = osp_engine_create("nonsense: 1", nullptr, &engine);
  const bool named = std::strstr(osp_last_error(), "nonsense") != nullptr;
  return status == OSP_ERROR_INVALID_CONFIG && engine == nullptr && named ? 0 : 1;
}
