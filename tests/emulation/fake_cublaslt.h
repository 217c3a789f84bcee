// What tests tell the fake cuBLASLt, by dlsym: how streams take work, and what it shall refuse.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {
/// Puts task(argument) on a stream, behind what is there, and returns at once. Null: tasks run in
/// the call.
typedef void (*FakeCublasLtEnqueue)(void* stream, void (*task)(void*), void* argument);
void fake_cublaslt_set_enqueue(FakeCublasLtEnqueue enqueue);
/// The call'th product from now on fails, counting from 1. 0: none.
void fake_cublaslt_fail_product(int call);
/// No algorithm is found for any product.
void fake_cublaslt_find_nothing(bool nothing);
/// Handles and descriptors that are not destroyed.
int fake_cublaslt_live_objects();
/// How often an algorithm was asked for.
int fake_cublaslt_choices();
/// What the last wrong call did.
const char* fake_cublaslt_last_error();
}
