"""planner/: the tests of "What usually goes wrong", all of them in test_planner.py."""

ROWS = {
    "the nearest number of GPUs": "test_planner.py::test_a_mistake_is_one_sentence",
    "No mesh fits": "test_planner.py::test_a_job_that_does_not_fit",
    "no such mesh splits": "test_planner.py::test_a_mistake_is_one_sentence",
    "not validated for": "test_planner.py::test_what_no_row_backs_is_said",
    "it has experts": "test_planner.py::test_a_config_that_is_no_decoder",
}
