// The header in C11: an engine is made, named wrongly, and destroyed.
#include <overspill.h>
#include <stdio.h>
#include <string.h>

_Static_assert(sizeof(osp_status_t) == sizeof(int), "statuses are ints");

int main(void) {
  osp_engine_options_t options = OSP_ENGINE_OPTIONS_INIT;
  osp_engine_t engine = NULL;
  if (osp_engine_create("{\"precision\": \"float32\"}", &options, &engine) != OSP_SUCCESS) {
    fprintf(stderr, "%s\n", osp_last_error());
    return 1;
  }
  const uint64_t shape[2] = {8, 8};
  osp_tensor_t tensor = OSP_TENSOR_INIT;
  tensor.name = "weight";
  tensor.shape = shape;
  tensor.rank = 2;
  if (osp_layer_register(engine, "layer", &tensor, 1, NULL) != OSP_SUCCESS) return 1;
  if (osp_acquire(engine, 0, NULL, NULL, 0) != OSP_ERROR_NOT_FINALIZED) return 1;
  if (strcmp(osp_status_string(OSP_ERROR_NOT_FINALIZED), "OSP_ERROR_NOT_FINALIZED") != 0) return 1;
  return osp_engine_destroy(engine) == OSP_SUCCESS ? 0 : 1;
}
