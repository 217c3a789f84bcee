// What tests tell the fake cuDNN, by dlsym: how streams take work, and what it shall refuse.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {
/// Puts task(argument) on a stream, behind what is there, and returns at once. Null: tasks run in
/// the call.
typedef void (*FakeCudnnEnqueue)(void* stream, void (*task)(void*), void* argument);
void fake_cudnn_set_enqueue(FakeCudnnEnqueue enqueue);
/// What every plan built from now on needs.
void fake_cudnn_set_workspace(int64_t bytes);
/// The next plans are not supported.
void fake_cudnn_refuse_plans(int plans);
/// The next execution fails.
void fake_cudnn_fail_execution();
/// Handles and descriptors that are not destroyed.
int fake_cudnn_live_objects();
/// Plans executed so far.
int fake_cudnn_executions();
}
