// What tests tell the fake NCCL, by dlsym: how streams take work, and which rank fails.
#pragma once

extern "C" {
/// Puts task(argument) on a stream, behind what is there, and returns at once. Before any call.
typedef void (*FakeNcclEnqueue)(void* stream, void (*task)(void*), void* argument);
void fake_nccl_set_enqueue(FakeNcclEnqueue enqueue);
/// In every communicator this rank's part is never done again, and all ranks get errors. -1: none.
void fake_nccl_fail_rank(int rank);
/// How many communicators are neither destroyed nor aborted.
int fake_nccl_live_communicators();
}
