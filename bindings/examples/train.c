// Trains a small network through Overspill's C API, with less memory than its state takes: eight
// layers y = tanh(W x + b) learn to rotate and squash random points. The state that does not fit
// lives in files in the directory that is the program's argument.
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "overspill.h"

enum { kLayers = 8, kWidth = 256, kBatch = 16, kSteps = 60 };

static void require(osp_status_t status, const char* what) {
  if (status == OSP_SUCCESS) return;
  fprintf(stderr, "%s: %s: %s\n", what, osp_status_string(status), osp_last_error());
  exit(1);
}

/* What the engine shall be: budgets, and how it updates. */
static osp_engine_t create_engine(const char* directory) {
  char configuration[4096];
  snprintf(configuration, sizeof configuration,
           "precision: float32\n"
           "optimizer: adamw\n"
           "max_grad_norm: 1.0\n"
           "offload:\n"
           "  device_memory: 2MiB\n"
           "  host_memory: 2MiB\n"
           "  nvme_paths: ['%s']\n",
           directory);
  osp_engine_t engine = NULL;
  require(osp_engine_create(configuration, NULL, &engine), "create");
  return engine;
}

/* Gives it the layers: names and shapes; the program keeps no weights of its own. */
static void register_layers(osp_engine_t engine) {
  const uint64_t matrix[2] = {kWidth, kWidth}, vector[1] = {kWidth};
  for (int l = 0; l < kLayers; ++l) {
    char layer[32], weight[32], bias[32];
    snprintf(layer, sizeof layer, "layers.%d", l);
    snprintf(weight, sizeof weight, "layers.%d.weight", l);
    snprintf(bias, sizeof bias, "layers.%d.bias", l);
    osp_tensor_t tensors[2] = {OSP_TENSOR_INIT, OSP_TENSOR_INIT};
    tensors[0].name = weight;
    tensors[0].shape = matrix;
    tensors[0].rank = 2;
    tensors[1].name = bias;
    tensors[1].shape = vector;
    tensors[1].rank = 1;
    require(osp_layer_register(engine, layer, tensors, 2, NULL), "register");
  }
}

static void initialize(osp_engine_t engine) {
  require(osp_initialize_weights(engine, 1, 1.0 / sqrt(kWidth)), "initialize");
  static const float zeros[kWidth];
  for (int l = 0; l < kLayers; ++l) {
    char bias[32];
    snprintf(bias, sizeof bias, "layers.%d.bias", l);
    require(osp_tensor_write(engine, bias, zeros, OSP_FLOAT32, kWidth), "write");
  }
}

static float uniform(uint32_t* state) {
  *state = *state * 1664525u + 1013904223u;
  return (float)(*state >> 8) / (float)(1 << 23) - 1.0f;
}

static void make_batch(uint32_t* state, float* x, float* target) {
  for (int b = 0; b < kBatch; ++b) {
    for (int i = 0; i < kWidth; ++i) x[b * kWidth + i] = uniform(state);
    for (int i = 0; i < kWidth; ++i) {
      const float next = x[b * kWidth + (i + 1) % kWidth];
      target[b * kWidth + i] = 0.5f * next;
    }
  }
}

static void forward(const float* w, const float* bias, const float* x, float* y) {
  for (int b = 0; b < kBatch; ++b) {
    for (int o = 0; o < kWidth; ++o) {
      float sum = bias[o];
      for (int i = 0; i < kWidth; ++i) sum += w[o * kWidth + i] * x[b * kWidth + i];
      y[b * kWidth + o] = tanhf(sum);
    }
  }
}

/* dy becomes dx; dw and dbias receive the layer's gradients. */
static void backward(const float* w, const float* x, const float* y, float* dy, float* dw,
                     float* dbias) {
  static float dx[kBatch * kWidth];
  memset(dw, 0, sizeof(float) * kWidth * kWidth);
  memset(dbias, 0, sizeof(float) * kWidth);
  memset(dx, 0, sizeof dx);
  for (int b = 0; b < kBatch; ++b) {
    for (int o = 0; o < kWidth; ++o) {
      const float out = y[b * kWidth + o];
      const float d = dy[b * kWidth + o] * (1.0f - out * out);
      dbias[o] += d;
      for (int i = 0; i < kWidth; ++i) {
        dw[o * kWidth + i] += d * x[b * kWidth + i];
        dx[b * kWidth + i] += d * w[o * kWidth + i];
      }
    }
  }
  memcpy(dy, dx, sizeof dx);
}

static float activations[kLayers + 1][kBatch * kWidth];

/* One step: the loss of its batch. */
static double train_step(osp_engine_t engine, uint32_t* state) {
  static float target[kBatch * kWidth], dy[kBatch * kWidth];
  static float dw[kWidth * kWidth], dbias[kWidth];
  const void* weights[2];
  make_batch(state, activations[0], target);
  for (uint32_t l = 0; l < kLayers; ++l) {
    require(osp_acquire(engine, l, NULL, weights, 2), "acquire");
    forward(weights[0], weights[1], activations[l], activations[l + 1]);
    require(osp_release(engine, l, NULL), "release");
  }
  double loss = 0;
  for (int i = 0; i < kBatch * kWidth; ++i) {
    const float error = activations[kLayers][i] - target[i];
    loss += (double)error * error / (kBatch * kWidth);
    dy[i] = 2.0f * error / (kBatch * kWidth);
  }
  for (uint32_t l = kLayers; l-- > 0;) {
    require(osp_acquire(engine, l, NULL, weights, 2), "acquire");
    backward(weights[0], activations[l], activations[l + 1], dy, dw, dbias);
    require(osp_submit_gradient(engine, l, 0, dw, OSP_FLOAT32, kWidth * kWidth, NULL), "submit");
    require(osp_submit_gradient(engine, l, 1, dbias, OSP_FLOAT32, kWidth, NULL), "submit");
    require(osp_release(engine, l, NULL), "release");
  }
  osp_step_options_t step = OSP_STEP_OPTIONS_INIT;
  step.learning_rate = 2e-3;
  require(osp_step(engine, &step), "step"); /* updates run while the next step begins */
  return loss;
}

int main(int argc, char** argv) {
  if (argc != 2) {
    fprintf(stderr, "usage: %s DIRECTORY\n", argv[0]);
    return 2;
  }
  osp_engine_t engine = create_engine(argv[1]);
  register_layers(engine);
  osp_plan_t plan = OSP_PLAN_INIT;
  require(osp_finalize(engine, &plan), "finalize");
  initialize(engine);
  uint64_t state_bytes = 0;
  for (int tier = 0; tier < 3; ++tier) {
    state_bytes += plan.weight_bytes[tier] + plan.gradient_bytes[tier] + plan.optimizer_bytes[tier];
  }
  printf("%llu parameters, %llu KiB of state; %llu KiB of memory, %llu KiB in files\n",
         (unsigned long long)plan.parameters, (unsigned long long)state_bytes / 1024,
         (unsigned long long)(plan.device_bytes + plan.host_bytes) / 1024,
         (unsigned long long)plan.nvme_bytes / 1024);
  uint32_t random = 1;
  double first = 0, last = 0;
  for (int step = 0; step < kSteps; ++step) {
    last = train_step(engine, &random);
    if (step == 0) first = last;
    if (step % 10 == 0 || step == kSteps - 1) printf("step %d: loss %.6f\n", step, last);
  }
  osp_step_result_t result = OSP_STEP_RESULT_INIT;
  require(osp_step_wait(engine, &result), "wait");
  osp_statistics_t statistics = OSP_STATISTICS_INIT;
  require(osp_get_statistics(engine, &statistics), "statistics");
  printf("%llu updates; %llu KiB read from files, %llu KiB written\n",
         (unsigned long long)result.updates,
         (unsigned long long)statistics.lane_bytes[OSP_LANE_NVME_READ] / 1024,
         (unsigned long long)statistics.lane_bytes[OSP_LANE_NVME_WRITE] / 1024);
  require(osp_engine_destroy(engine), "destroy");
  const int learned = last < first && plan.device_bytes + plan.host_bytes < state_bytes;
  return learned ? 0 : 1;
}
