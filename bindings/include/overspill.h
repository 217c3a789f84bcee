// Overspill's C API: another trainer gives the engine its layers and keeps model code and loop.
/* The engine keeps weights, optimizer state and gradients in device memory, host memory and on
 * NVMe, brings a layer's weights to where they are computed with just before they are needed, adds
 * up gradients in float32, and updates the layers. A program
 *
 *   osp_engine_create        from a configuration text
 *   osp_layer_register       for each layer, in the order of the forward
 *   osp_finalize             plans and allocates everything, or says what does not fit
 *   osp_load_weights         (or osp_initialize_weights, osp_tensor_write, osp_checkpoint_load)
 *   in each step
 *     osp_acquire, compute, osp_release     for each layer of the forward
 *     osp_acquire, compute, osp_submit_gradient(s), osp_release   for each layer of the backward
 *     osp_step
 *   osp_checkpoint_save, osp_export_weights
 *   osp_engine_destroy
 *
 * Conventions, which hold for every call:
 * - Status. OSP_SUCCESS, or what went wrong; osp_last_error has the whole message. A call that
 *   returns OSP_ERROR_INVALID_ARGUMENT up to OSP_ERROR_NO_WEIGHTS has changed nothing. After
 *   one of the errors from OSP_ERROR_IO on, met while the engine works in the background, every
 *   later call on layers, gradients, steps, weights and checkpoints returns that first error again.
 *   With several ranks an error of one stops all, also one of loading, exporting or saving; the
 *   others' says what it was.
 * - Threads. Any thread may call, at any time; calls on one engine that do not wait are done one
 *   after the other, and a call that waits keeps no other thread from calling. But while one sets,
 *   reads or exports weights, loads a checkpoint, flushes, or applies updates for a checkpoint that
 *   is to be saved, others' calls on layers and steps wait for it. Only osp_engine_destroy must be
 *   the last call. Messages of osp_last_error belong to the thread.
 * - Ownership. The engine copies names, texts and arrays that it is given; pointers that it hands
 *   out are its own. Sizes are in bytes where they are named bytes, and elements where count.
 * - Streams. Where the device is a GPU, `stream` is the program's cudaStream_t there that uses the
 * pointers; null is the legacy default stream. Calls put their work on it, or let their own streams
 * wait for it, and never wait for what the program has put there, but where they say so; memory
 * that is passed is the GPU's own, managed, or pinned. The calling thread's current GPU is left as
 * it is. On the host `stream` must be null, and a call returns when the memory may be used.
 * - Structures begin with their size: start from the initialiser (OSP_..._INIT), so that a program
 *   that was built against an older header keeps working.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#define OSP_VERSION_MAJOR 0
#define OSP_VERSION_MINOR 1
#define OSP_VERSION_PATCH 0

#if defined(__GNUC__)
#define OSP_API __attribute__((visibility("default")))
#else
#define OSP_API
#endif

/* C++ is told the type that C gives these, so that a value without a name is a mistake that can be
 * refused, and no undefined behaviour. */
#ifdef __cplusplus
#define OSP_ENUM(name) enum name : unsigned int
#else
#define OSP_ENUM(name) enum name
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- status ------------------------------------------------------------------------------- */

typedef OSP_ENUM(osp_status) {
  OSP_SUCCESS = 0,

  /* The caller's mistakes: nothing has changed. */
  OSP_ERROR_INVALID_ARGUMENT = 1,   /* a null pointer, an unknown value, an index out of range */
  OSP_ERROR_INVALID_HANDLE = 2,     /* no engine: null, or destroyed */
  OSP_ERROR_INVALID_CONFIG = 3,     /* a key or a value of the configuration, or an option */
  OSP_ERROR_NOT_FINALIZED = 4,      /* before osp_finalize */
  OSP_ERROR_ALREADY_FINALIZED = 5,  /* layers and order are fixed */
  OSP_ERROR_UNKNOWN_TENSOR = 6,     /* no tensor has the name */
  OSP_ERROR_DUPLICATE_NAME = 7,     /* a layer or a tensor has the name already */
  OSP_ERROR_SIZE_MISMATCH = 8,      /* another number of elements, or bytes, than it must be */
  OSP_ERROR_DTYPE_MISMATCH = 9,     /* another type than the precision's, or an unknown one */
  OSP_ERROR_ALREADY_ACQUIRED = 10,  /* the layer is held */
  OSP_ERROR_NOT_ACQUIRED = 11,      /* the layer is not held */
  OSP_ERROR_NO_SLOT = 12,           /* too many layers are held at once */
  OSP_ERROR_LAYERS_HELD = 13,       /* the call needs all layers released */
  OSP_ERROR_FROZEN = 14,            /* a gradient of what does not train */
  OSP_ERROR_GRADIENT_COMPLETE = 15, /* the step has all of this gradient already */
  OSP_ERROR_GRADIENT_MISSING = 16,  /* the step lacks gradients */
  OSP_ERROR_STEP_NOT_STARTED = 17,  /* osp_step_begin is missing, or there is no step to wait for */
  OSP_ERROR_NO_WEIGHTS = 18,        /* nothing has set the weights yet */

  /* What the machine, the files or the run refuse. */
  OSP_ERROR_INVALID_FILE = 32, /* its content is not what the format, or the model, demands */
  OSP_ERROR_NOT_FOUND = 33,    /* a path that does not exist */
  OSP_ERROR_DOES_NOT_FIT = 34, /* a budget is too small: the message says by how much */
  OSP_ERROR_UNSUPPORTED = 35,  /* this build, or this machine, cannot do it */
  OSP_ERROR_CANCELLED = 36,    /* a callback wished it */
  OSP_ERROR_IO = 48,           /* the operating system broke an I/O operation */
  OSP_ERROR_NON_FINITE = 49,   /* too many steps without finite gradients, or one that cannot be
                                  undone */
  OSP_ERROR_RANK_LOST = 50,    /* another rank is gone */
  OSP_ERROR_INTERNAL = 51      /* a bug: please report it */
} osp_status_t;

/* A status's name, "OSP_ERROR_IO"; static memory. Of an unknown one, "OSP_ERROR_UNKNOWN". */
OSP_API const char* osp_status_string(osp_status_t status);

/* What, which, where, why and what to do about the calling thread's last call that failed; empty
 * before. Valid until the thread's next call that fails. Never null. */
OSP_API const char* osp_last_error(void);

/* The library's version, OSP_VERSION_MAJOR * 10000 + MINOR * 100 + PATCH. */
OSP_API uint32_t osp_version(void);

/* ---- engine ------------------------------------------------------------------------------- */

typedef struct osp_engine* osp_engine_t;

typedef OSP_ENUM(osp_log_level) {
  OSP_LOG_DEBUG = 0,
  OSP_LOG_INFO = 1,
  OSP_LOG_WARNING = 2
} osp_log_level_t;

/* One line without an end of line, valid during the call. Called from the engine's threads and
 * from those that call the engine, one at a time; it must not call the engine. */
typedef void (*osp_log_callback_t)(void* user, osp_log_level_t level, const char* message);

/* How far loading or saving has come: `what` names it ("loading weights"), `fraction` is from 0 to
 * 1. Returning non-zero ends it with OSP_ERROR_CANCELLED, with no partial file left under a final
 * name; weights that were being loaded are undefined then, until they are loaded again. Called as
 * osp_log_callback_t is. */
typedef int (*osp_progress_callback_t)(void* user, const char* what, double fraction);

/* In what order a step with several micro-batches passes through the layers. */
typedef OSP_ENUM(osp_loop) {
  /* All layers for one micro-batch, then for the next: unfinished gradients are kept in float32
   * pages, which live where gradients do and move like them. */
  OSP_LOOP_MICRO_BATCH_MAJOR = 0,
  /* All micro-batches pass a layer before the next layer: its sums stay where they are, and
   * gradients take half the memory in bf16. A layer's gradient must be complete before another's
   * begins. */
  OSP_LOOP_LAYER_MAJOR = 1
} osp_loop_t;

typedef struct osp_engine_options {
  size_t size;
  /* This process among the ranks, from 0, and their number. world_size 0: what torchrun, mpirun or
   * Slurm say in the environment (RANK, WORLD_SIZE, MASTER_ADDR, ...), or a rank alone. */
  uint32_t rank, world_size;
  /* Where rank 0 listens, "host:port"; null: MASTER_ADDR and MASTER_PORT. Unused by one rank. */
  const char* master_address;
  /* "host": the configuration's offload.device says whether it shares the host's memory. "cuda:N":
   * a GPU, as CUDA counts them; "cuda": that of the rank's place on its host. Null: "cuda" where
   * offload.device is cuda, else "host". On a GPU, offload.device_memory (unset: half of what is
   * free in osp_finalize) is the engine's share of its memory, allocated in one piece. */
  const char* device;
  /* How many layers the program holds at once, at least 1. */
  uint32_t held_layers;
  osp_loop_t loop;
  /* Of saved activations (osp_activation_save): at most so much host memory, and so much of
   * offload.nvme_paths behind it. Both are on top of the configuration's budgets. */
  uint64_t activation_host_bytes, activation_nvme_bytes;
  osp_log_callback_t log; /* null: lines go to stderr */
  osp_log_level_t log_level;
  osp_progress_callback_t progress; /* may be null */
  void* user;                       /* handed to both */
} osp_engine_options_t;

#define OSP_ENGINE_OPTIONS_INIT                                                                \
  {                                                                                            \
    sizeof(osp_engine_options_t), 0, 1, NULL, NULL, 1, OSP_LOOP_MICRO_BATCH_MAJOR, 0, 0, NULL, \
        OSP_LOG_WARNING, NULL, NULL                                                            \
  }

/* Creates an engine from `configuration`: YAML or JSON text with keys of the training file (see
 * docs/configuration.md): precision, optimizer, optimizer_state, weight_decay, adam_*,
 * sgd_momentum, adafactor_decay, max_grad_norm, max_non_finite_steps, gradient_accumulation_steps,
 * seed, unfrozen_parameters, zero_stage, hybrid_shard, reduce_dtype, rank_timeout and the section
 * offload. Relative paths start at the current directory. Null or empty: all defaults. `options`
 * may be null. Several engines may live in one process. With several ranks, returns when they have
 * met. Nothing is allocated yet.
 * Errors: INVALID_ARGUMENT, INVALID_CONFIG (line, key, what is wrong, the cure), UNSUPPORTED (a
 * GPU, and the build or the machine has none), RANK_LOST. */
OSP_API osp_status_t osp_engine_create(const char* configuration,
                                       const osp_engine_options_t* options, osp_engine_t* engine);

/* Waits for what is under way (a checkpoint being saved is finished; updates that are still pending
 * are not applied: see osp_flush), then frees everything; layers may be held. The handle is invalid
 * from then on. Returns the error that the engine has met in the background, if any; the engine is
 * destroyed all the same. Null is not an error.
 * Errors: INVALID_HANDLE, and the engine's first error. */
OSP_API osp_status_t osp_engine_destroy(osp_engine_t engine);

/* ---- layers ------------------------------------------------------------------------------- */

typedef OSP_ENUM(osp_dtype) {
  OSP_DTYPE_DEFAULT = 0, /* the precision's: bf16 or float32 */
  OSP_FLOAT32 = 1,
  OSP_BFLOAT16 = 2,
  OSP_FLOAT16 = 3
} osp_dtype_t;

/* A tensor of a layer. */
typedef struct osp_tensor {
  size_t size;
  const char* name;      /* as in safetensors files; unique in the engine */
  const uint64_t* shape; /* `rank` extents, all positive; a scalar has rank 0 */
  uint32_t rank;
  osp_dtype_t dtype; /* of its weights in compute: must be the precision's */
  int32_t decay;     /* weight decay applies: 1, 0, or -1: from rank 2 on */
  uint32_t group;    /* learning-rate group: an index into osp_step_options.learning_rates */
  int32_t frozen;    /* 1: it does not train; it has no gradient and no optimizer state. What
                        unfrozen_parameters of the configuration does not match is frozen as well */
  /* The name of a tensor of another layer, registered before or after, that this one is: null for
   * none. Its shape is the same. It has no weights of its own: acquiring this layer brings the
   * other one's as well, and gradients add up there. It is frozen
   * where the other one is; `frozen` is 0 here. In files, only the other tensor is there. */
  const char* tied_to;
} osp_tensor_t;

#define OSP_TENSOR_INIT \
  { sizeof(osp_tensor_t), NULL, NULL, 0, OSP_DTYPE_DEFAULT, -1, 0, 0, NULL }

/* Registers a layer: the tensors that are acquired together. Layers count from 0 in the order of
 * registration, which should be that of the forward; `layer` receives its number (may be null).
 * All ranks register the same.
 * Errors: INVALID_HANDLE, INVALID_ARGUMENT, DUPLICATE_NAME, DTYPE_MISMATCH, ALREADY_FINALIZED. */
OSP_API osp_status_t osp_layer_register(osp_engine_t engine, const char* name,
                                        const osp_tensor_t* tensors, size_t count, uint32_t* layer);

/* Declares the order in which a step acquires layers: forward, then backward, for all
 * micro-batches. Without it the first step's order is recorded (until then, layers are prefetched
 * in the order of registration), and later that of a step which has deviated. Before or after
 * osp_finalize. Errors: INVALID_HANDLE, INVALID_ARGUMENT (an unknown layer, no layers). */
OSP_API osp_status_t osp_set_order(osp_engine_t engine, const uint32_t* layers, size_t count);

/* Where everything lives, in bytes of this rank. */
typedef struct osp_plan {
  size_t size;
  uint32_t layers;
  uint64_t parameters; /* of the model */
  uint64_t trainable_parameters;
  uint64_t device_bytes, host_bytes, nvme_bytes; /* allocated */
  /* Homes of each kind of state: on the device, in host memory, on NVMe. */
  uint64_t weight_bytes[3], gradient_bytes[3], optimizer_bytes[3];
  uint32_t prefetch_depth; /* layers that are loaded ahead */
  uint32_t weight_slots;   /* layers without a home in the device's memory that it holds at once */
} osp_plan_t;

#define OSP_PLAN_INIT \
  { sizeof(osp_plan_t), 0, 0, 0, 0, 0, 0, {0}, {0}, {0}, 0, 0 }

/* Plans the placement of all state within the budgets, and allocates it: no other call allocates
 * memory for state. `plan` receives what was decided (may be null). What cannot fit is refused,
 * naming what is short, by how much and which setting would make it fit; layers may be
 * registered, and osp_finalize called, again then only on a new engine. All ranks call it at once.
 * Errors: INVALID_HANDLE, INVALID_ARGUMENT (no layers, an unknown tied_to, another shape there),
 * ALREADY_FINALIZED, INVALID_CONFIG, DOES_NOT_FIT, IO, RANK_LOST. */
OSP_API osp_status_t osp_finalize(osp_engine_t engine, osp_plan_t* plan);

typedef OSP_ENUM(osp_tier) { OSP_TIER_DEVICE = 0, OSP_TIER_HOST = 1, OSP_TIER_NVME = 2 } osp_tier_t;

typedef struct osp_layer_info {
  size_t size;
  uint32_t tensors;
  /* Elements of the layer's flattened weights and gradients. Each tensor begins at its offset
   * (osp_tensor_info); tied tensors are not part of it. */
  uint64_t flat_count;
  uint64_t weight_bytes;                    /* flat_count elements in the precision's type */
  osp_tier_t weights, gradients, optimizer; /* homes */
} osp_layer_info_t;

#define OSP_LAYER_INFO_INIT \
  { sizeof(osp_layer_info_t), 0, 0, 0, OSP_TIER_DEVICE, OSP_TIER_DEVICE, OSP_TIER_DEVICE }

/* Errors: INVALID_HANDLE, INVALID_ARGUMENT, NOT_FINALIZED. */
OSP_API osp_status_t osp_layer_get_info(osp_engine_t engine, uint32_t layer,
                                        osp_layer_info_t* info);

typedef struct osp_tensor_info {
  size_t size;
  uint32_t layer, index; /* the tensor's place among its layer's */
  uint64_t count;        /* elements */
  uint64_t offset;       /* first element in the layer's flattened parameters; of a tied tensor, in
                            those of owner_layer */
  uint32_t owner_layer;  /* the layer whose parameters it is: another one when tied */
  osp_dtype_t dtype;     /* of its weights in compute */
  int32_t frozen;
} osp_tensor_info_t;

#define OSP_TENSOR_INFO_INIT \
  { sizeof(osp_tensor_info_t), 0, 0, 0, 0, 0, OSP_DTYPE_DEFAULT, 0 }

/* By the tensor's name. Errors: INVALID_HANDLE, INVALID_ARGUMENT, NOT_FINALIZED,
 * UNKNOWN_TENSOR. */
OSP_API osp_status_t osp_tensor_get_info(osp_engine_t engine, const char* tensor,
                                         osp_tensor_info_t* info);

/* The plan in sentences, for people: a line per kind of state and tier, slots, budgets. Writes at
 * most `capacity` bytes with the final zero to `text` (may be null when capacity is 0), and to
 * `needed` (may be null) how many there are.
 * Errors: INVALID_HANDLE, INVALID_ARGUMENT, NOT_FINALIZED. */
OSP_API osp_status_t osp_describe_plan(osp_engine_t engine, char* text, size_t capacity,
                                       size_t* needed);

/* ---- weights in and out ------------------------------------------------------------------- */

/* All calls of this section wait for what is under way, apply pending updates (osp_flush), need all
 * layers released, and are called by all ranks at once. Other calls on the engine wait for them. */

/* Loads all weights by their tensors' names from a safetensors file, or a directory with
 * model.safetensors or model.safetensors.index.json. F32, BF16 or F16; with bf16 precision, float32
 * masters keep all bits. Tensors of the file that the engine does not know are ignored. Memory used
 * is a few MiB whatever the model's size. Moments and counts of an earlier run are forgotten.
 * Errors: INVALID_HANDLE, INVALID_ARGUMENT, NOT_FINALIZED, LAYERS_HELD, NOT_FOUND, INVALID_FILE (a
 * tensor that is missing, or of another shape), CANCELLED, IO. */
OSP_API osp_status_t osp_load_weights(osp_engine_t engine, const char* path);

/* Draws all weights: normal(0, deviation) for tensors that decay (from rank 2 on), ones for the
 * others; the same numbers for the same seed and order of tensors, whatever the placement and the
 * number of ranks. Forgets moments and counts.
 * Errors: INVALID_HANDLE, INVALID_ARGUMENT (a negative or non-finite deviation), NOT_FINALIZED,
 * LAYERS_HELD, CANCELLED, IO. */
OSP_API osp_status_t osp_initialize_weights(osp_engine_t engine, uint64_t seed, double deviation);

/* Sets a whole tensor, its float32 master included, from the caller's host memory: `count` elements
 * of `dtype` (OSP_DTYPE_DEFAULT: the precision's). Moments stay. Where nothing has set the weights
 * before, all others are first initialised with a deviation of 0.
 * Errors: INVALID_HANDLE, INVALID_ARGUMENT, NOT_FINALIZED, UNKNOWN_TENSOR, SIZE_MISMATCH,
 * DTYPE_MISMATCH, LAYERS_HELD, IO. */
OSP_API osp_status_t osp_tensor_write(osp_engine_t engine, const char* tensor, const void* values,
                                      osp_dtype_t dtype, uint64_t count);

/* Copies a whole tensor to the caller's host memory. OSP_FLOAT32 is the float32 master;
 * OSP_BFLOAT16 and OSP_DTYPE_DEFAULT are the weights of compute. With ranks that share weights, the
 * parts of the others come as compute has them.
 * Errors: as osp_tensor_write, and NO_WEIGHTS. */
OSP_API osp_status_t osp_tensor_read(osp_engine_t engine, const char* tensor, void* values,
                                     osp_dtype_t dtype, uint64_t count);

/* Writes the weights, as compute uses them, as safetensors to a directory (made if need be), in
 * files of at most 5 GB with an index. `config_json`: the text of its config.json, or null for
 * none. Errors: INVALID_HANDLE, INVALID_ARGUMENT, NOT_FINALIZED, LAYERS_HELD, NO_WEIGHTS,
 * CANCELLED, IO. */
OSP_API osp_status_t osp_export_weights(osp_engine_t engine, const char* directory,
                                        const char* config_json);

/* ---- use ---------------------------------------------------------------------------------- */

/* Holds a layer's weights where compute reads them: `weights` receives a pointer for each of its
 * tensors, in the order of registration (`count` of them, or 0 and null). Valid until osp_release;
 * read only. The weights are those after all steps so far: a pending update is applied first. The
 * call returns when they are there, on a GPU as well: what is put on `stream`, or any other, from
 * now on finds them, and what went wrong is this call's error. The layers that follow in the order
 * are fetched meanwhile, so that it waits only where the lanes are slower than the program. Held
 * layers stay where they are; with offload.update: in_backward, their weights change once their
 * gradient is complete (on a GPU: behind what was put on a stream before the gradient was).
 * Errors: INVALID_HANDLE, INVALID_ARGUMENT, NOT_FINALIZED, SIZE_MISMATCH (another count),
 * ALREADY_ACQUIRED, NO_SLOT (held_layers are held), NO_WEIGHTS, INVALID_ARGUMENT (a stream on the
 * host). */
OSP_API osp_status_t osp_acquire(osp_engine_t engine, uint32_t layer, void* stream,
                                 const void** weights, size_t count);

/* Starts fetching a layer, as far as slots allow, and returns at once: a hint for programs that
 * know better than the order. Errors: INVALID_HANDLE, INVALID_ARGUMENT, NOT_FINALIZED,
 * NO_WEIGHTS. */
OSP_API osp_status_t osp_prefetch(osp_engine_t engine, uint32_t layer);

/* Ends a layer's use; on a GPU, once what was put on `stream` so far is done, for which the call
 * does not wait. Its pointers are invalid from then on.
 * Errors: INVALID_HANDLE, INVALID_ARGUMENT, NOT_FINALIZED, NOT_ACQUIRED. */
OSP_API osp_status_t osp_release(osp_engine_t engine, uint32_t layer, void* stream);

/* ---- gradients ---------------------------------------------------------------------------- */

/* Adds a tensor's gradient of one micro-batch to the step's: `count` elements of `dtype`, summed in
 * float32 in the order of the calls, whatever their streams. On the host the memory is the caller's
 * again on return, on a GPU in the order of `stream`; the call may wait for earlier layers' sums to
 * have gone their way. The layer need not be held. A layer's gradient is complete once each of its
 * trainable tensors has come gradient_accumulation_steps times (a tied one counts for its owner,
 * which waits for both), or with osp_gradients_done; it is then reduced over the ranks and goes its
 * way in the background. `tensor` is the index in its layer.
 * Errors: INVALID_HANDLE, INVALID_ARGUMENT (on a GPU, of memory that it does not reach too),
 * NOT_FINALIZED, FROZEN, SIZE_MISMATCH, DTYPE_MISMATCH, GRADIENT_COMPLETE, STEP_NOT_STARTED
 * (in_backward without osp_step_begin), NO_SLOT (layer-major, and another layer's gradient is not
 * complete). */
OSP_API osp_status_t osp_submit_gradient(osp_engine_t engine, uint32_t layer, uint32_t tensor,
                                         const void* gradient, osp_dtype_t dtype, uint64_t count,
                                         void* stream);

/* The same for all trainable tensors of a layer at once, which lie in `gradients` at their offsets
 * in the layer's flattened parameters (osp_tensor_info); `count` is the layer's flat_count. What
 * lies between them, and frozen ones, is not read. Tied tensors are submitted by themselves.
 * Errors: the same. */
OSP_API osp_status_t osp_submit_gradients(osp_engine_t engine, uint32_t layer,
                                          const void* gradients, osp_dtype_t dtype, uint64_t count,
                                          void* stream);

/* Completes a layer's gradient of this step with what has come; what has not counts as zero.
 * Errors: INVALID_HANDLE, INVALID_ARGUMENT, NOT_FINALIZED, FROZEN (nothing of it trains),
 * GRADIENT_COMPLETE, STEP_NOT_STARTED. */
OSP_API osp_status_t osp_gradients_done(osp_engine_t engine, uint32_t layer);

/* ---- steps -------------------------------------------------------------------------------- */

typedef struct osp_step_options {
  size_t size;
  double learning_rate;         /* of all groups, unless learning_rates is there */
  const double* learning_rates; /* one for each group, from 0; may be null */
  size_t groups;                /* how many there are */
  /* What gradients have been multiplied by (a loss scale): they are divided by it in float32,
   * before norm and clipping. Positive. */
  double loss_scale;
  /* 1: layers whose gradient is not complete are completed with what has come; those that have none
   * keep weights and moments. 0: they are an error. */
  int32_t allow_missing;
} osp_step_options_t;

#define OSP_STEP_OPTIONS_INIT \
  { sizeof(osp_step_options_t), 0.0, NULL, 0, 1.0, 0 }

typedef struct osp_step_result {
  size_t size;
  uint64_t step;        /* steps so far, this one included */
  uint64_t updates;     /* of them, those that were not skipped */
  double gradient_norm; /* of all ranks, without the loss scale, before clipping */
  double clip_factor;   /* what gradients are multiplied by: 1 where nothing is clipped */
  int32_t skipped;      /* 1: a gradient was not finite, and nothing changes */
} osp_step_result_t;

#define OSP_STEP_RESULT_INIT \
  { sizeof(osp_step_result_t), 0, 0, 0.0, 0.0, 0 }

/* Begins a step whose updates run in the backward (offload.update: in_backward), with their
 * options. Before the step's first gradient. Not called with next_forward, where osp_step has them.
 * Errors: INVALID_HANDLE, INVALID_ARGUMENT (of the options), NOT_FINALIZED, INVALID_CONFIG (updates
 * run in the next forward). */
OSP_API osp_status_t osp_step_begin(osp_engine_t engine, const osp_step_options_t* options);

/* Ends the step and returns at once. In the background the gradients' global norm becomes known,
 * and with it the clip factor (max_grad_norm) and whether the step is skipped. With next_forward
 * each layer is updated when it is fetched next, one that is held meanwhile in its place when its
 * next gradient comes; with in_backward that has happened already, and `options` is null. A step
 * that follows may begin at once. Errors: INVALID_HANDLE, INVALID_ARGUMENT, NOT_FINALIZED,
 * GRADIENT_MISSING, STEP_NOT_STARTED; NON_FINITE comes from a later call. */
OSP_API osp_status_t osp_step(osp_engine_t engine, const osp_step_options_t* options);

/* Whether the last step's result is known: `done` receives 1 or 0. `result` may be null; it is
 * filled when done. Errors: INVALID_HANDLE, INVALID_ARGUMENT, NOT_FINALIZED, STEP_NOT_STARTED (no
 * step yet), NON_FINITE. */
OSP_API osp_status_t osp_step_poll(osp_engine_t engine, int32_t* done, osp_step_result_t* result);

/* Waits for the last step's result. Errors: as osp_step_poll. */
OSP_API osp_status_t osp_step_wait(osp_engine_t engine, osp_step_result_t* result);

/* Applies updates that are pending and returns when all state is that after the last step. Needs
 * all layers released; all ranks call it at once. Errors: INVALID_HANDLE, NOT_FINALIZED,
 * LAYERS_HELD, IO, RANK_LOST. */
OSP_API osp_status_t osp_flush(osp_engine_t engine);

/* ---- activations -------------------------------------------------------------------------- */

typedef uint64_t osp_activation_t; /* 0 is none */

/* Takes a copy of the caller's buffer into the tiers, host memory first, and frees the caller of
 * it: on the host on return, on a GPU in the order of `stream`. What is spilled to make room, the
 * call waits for. Lives until it is restored or discarded. Errors: INVALID_HANDLE,
 * INVALID_ARGUMENT (null, or no bytes), NOT_FINALIZED, DOES_NOT_FIT (activation_host_bytes and
 * activation_nvme_bytes are full), IO. */
OSP_API osp_status_t osp_activation_save(osp_engine_t engine, const void* buffer, uint64_t bytes,
                                         void* stream, osp_activation_t* activation);

/* Starts fetching a saved activation from NVMe. Errors: INVALID_HANDLE, INVALID_ARGUMENT,
 * NOT_FINALIZED. */
OSP_API osp_status_t osp_activation_prefetch(osp_engine_t engine, osp_activation_t activation);

/* Copies it back and forgets it; on a GPU, the buffer is there in the order of `stream`. `bytes` is
 * what was saved.
 * Errors: INVALID_HANDLE, INVALID_ARGUMENT, NOT_FINALIZED, SIZE_MISMATCH, IO. */
OSP_API osp_status_t osp_activation_restore(osp_engine_t engine, osp_activation_t activation,
                                            void* buffer, uint64_t bytes, void* stream);

/* Forgets it. Errors: INVALID_HANDLE, INVALID_ARGUMENT, NOT_FINALIZED. */
OSP_API osp_status_t osp_activation_discard(osp_engine_t engine, osp_activation_t activation);

/* ---- checkpoints -------------------------------------------------------------------------- */

typedef struct osp_checkpoint_options {
  size_t size;
  const char* config_json; /* the text of the model's config.json; null for none */
  const char* user_state;  /* any UTF-8 of the caller's that the checkpoint keeps; null for none */
  uint32_t total_limit;    /* keep so many in the directory; 0: all */
  int32_t only_model;      /* 1: without optimizer state, not to be resumed from */
} osp_checkpoint_options_t;

#define OSP_CHECKPOINT_OPTIONS_INIT \
  { sizeof(osp_checkpoint_options_t), NULL, NULL, 0, 0 }

/* Saves weights, optimizer state and counts as `directory`/checkpoint-<step>, complete or not at
 * all, and points `directory`/latest to it. Applies pending updates first and returns then; the
 * files are written in the background, where layers that are fetched meanwhile wait, and those in
 * memory do not. Needs all layers released; all ranks call it at once. `options` may be null.
 * Errors: INVALID_HANDLE, INVALID_ARGUMENT, NOT_FINALIZED, LAYERS_HELD, NO_WEIGHTS; what goes wrong
 * later comes from osp_checkpoint_wait. */
OSP_API osp_status_t osp_checkpoint_save(osp_engine_t engine, const char* directory,
                                         const osp_checkpoint_options_t* options);

/* Whether the last checkpoint is there: `done` receives 1 or 0. Errors: INVALID_HANDLE,
 * INVALID_ARGUMENT, NOT_FINALIZED, and what saving met. */
OSP_API osp_status_t osp_checkpoint_poll(osp_engine_t engine, int32_t* done);

/* Waits for it. An error does not stop a rank that is alone: its state is as it was. Errors:
 * INVALID_HANDLE, NOT_FINALIZED, IO, CANCELLED. */
OSP_API osp_status_t osp_checkpoint_wait(osp_engine_t engine);

/* Verifies a checkpoint (a directory checkpoint-<step>, or one with a link `latest`) and loads it;
 * the run goes on bit for bit as the one that wrote it, whatever the placement and the number of
 * ranks. What has come of a step's gradients is dropped, as by every call that sets all weights.
 * What is wrong with the files is found before anything changes. Errors: INVALID_HANDLE,
 * INVALID_ARGUMENT, NOT_FINALIZED, LAYERS_HELD, NOT_FOUND, INVALID_FILE, INVALID_CONFIG (of another
 * precision), CANCELLED, IO. */
OSP_API osp_status_t osp_checkpoint_load(osp_engine_t engine, const char* directory);

/* The user_state of the checkpoint that was loaded, as osp_describe_plan gives text; empty without
 * one. Errors: INVALID_HANDLE, INVALID_ARGUMENT, NOT_FINALIZED. */
OSP_API osp_status_t osp_checkpoint_user_state(osp_engine_t engine, char* text, size_t capacity,
                                               size_t* needed);

/* ---- statistics --------------------------------------------------------------------------- */

/* What each lane of the engine does: read from NVMe, write to it, copy to the device, copy from it,
 * the engine's own kernels, collectives, updates on the host. */
#define OSP_LANES 7
typedef OSP_ENUM(osp_lane) {
  OSP_LANE_NVME_READ = 0,
  OSP_LANE_NVME_WRITE = 1,
  OSP_LANE_H2D = 2,
  OSP_LANE_D2H = 3,
  OSP_LANE_COMPUTE = 4,
  OSP_LANE_COLLECTIVE = 5,
  OSP_LANE_OPTIMIZER = 6
} osp_lane_t;

/* Since osp_finalize. */
typedef struct osp_statistics {
  size_t size;
  uint64_t steps, updates, skipped;
  uint64_t lane_bytes[OSP_LANES]; /* moved; 0 for lanes that do not move */
  uint64_t lane_ops[OSP_LANES];
  double lane_seconds[OSP_LANES]; /* at work */
  uint64_t acquires;              /* calls that succeeded */
  uint64_t acquires_waited;       /* of them, those that found the layer not there yet */
  double acquire_wait_seconds;    /* for how long */
  uint64_t deviations;            /* acquires out of order */
  uint64_t deviation_bytes;       /* loaded for them, or loaded ahead in vain */
  uint64_t activation_bytes_saved, activation_bytes_spilled; /* of those, to NVMe */
} osp_statistics_t;

#define OSP_STATISTICS_INIT \
  { sizeof(osp_statistics_t), 0, 0, 0, {0}, {0}, {0.0}, 0, 0, 0.0, 0, 0, 0, 0 }

/* Errors: INVALID_HANDLE, INVALID_ARGUMENT, NOT_FINALIZED. */
OSP_API osp_status_t osp_get_statistics(osp_engine_t engine, osp_statistics_t* statistics);

/* Records every operation of the engine from now on, until osp_trace_write: at most about a
 * million. Errors: INVALID_HANDLE, NOT_FINALIZED. */
OSP_API osp_status_t osp_trace_start(osp_engine_t engine);

/* Waits for what is under way, writes what was recorded as Chrome/Perfetto JSON, and stops
 * recording. Errors: INVALID_HANDLE, INVALID_ARGUMENT (no path, or nothing recorded),
 * NOT_FINALIZED, IO. */
OSP_API osp_status_t osp_trace_write(osp_engine_t engine, const char* path);

/* ---- memory ------------------------------------------------------------------------------- */

/* Host memory of whole pages, zeroed, on huge pages where the system gives them: bound to NUMA node
 * `node`, or with -1 where the calling thread runs, and pinned for the engine's device where that
 * is a GPU, for all GPUs. Freed by osp_memory_free, at the latest by osp_engine_destroy, when no
 * GPU uses it any more.
 * Errors: INVALID_HANDLE, INVALID_ARGUMENT (no bytes, a node that is not there), DOES_NOT_FIT. */
OSP_API osp_status_t osp_memory_allocate(osp_engine_t engine, uint64_t bytes, int32_t node,
                                         void** memory);

/* Null is not an error. Errors: INVALID_HANDLE, INVALID_ARGUMENT (not from this engine). */
OSP_API osp_status_t osp_memory_free(osp_engine_t engine, void* memory);

#ifdef __cplusplus
}
#endif
