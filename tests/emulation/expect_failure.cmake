# Runs PROGRAM's tests of FILTER, which must fail: it is a mutant.
execute_process(COMMAND ${PROGRAM} --gtest_list_tests --gtest_filter=${FILTER}
                RESULT_VARIABLE listed OUTPUT_VARIABLE tests)
if(NOT listed EQUAL 0 OR tests STREQUAL "")
  message(FATAL_ERROR "${PROGRAM} has no tests ${FILTER}: ${listed}")
endif()
execute_process(COMMAND ${PROGRAM} --gtest_brief=1 --gtest_filter=${FILTER}
                RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
if(result EQUAL 0)
  message(FATAL_ERROR "the mutant survives: all tests of ${FILTER} pass")
endif()
string(SUBSTRING "${output}" 0 600 start)
message("caught (${result}): ${start}")
