"""clusters/: the tests of "What usually goes wrong". Most need a lab of several hosts."""

import os
import shutil
import sys

import pytest
from helpers import ROOT, Job

ROWS = {
    "a lab needs ip and tc": "test_clusters_lab.py::test_what_is_missing_is_said",
    "no hosts could be made here": "test_a_kernel_that_allows_no_namespaces",
    "RendezvousConnectionError": "not provoked: the second agent gives up after minutes",
    "the agents meet, and then": "test_clusters_lab.py::test_hosts_that_do_not_know_each_other",
    "ranks meet, and then": (
        "test_clusters_lab.py::test_a_host_with_several_interfaces",
        "test_clusters_lab.py::test_a_firewall_that_opens_one_port",
    ),
    "hosts with `--node-rank`": "test_clusters_lab.py::test_two_hosts_with_one_number",
    "two jobs mix": (
        "test_clusters_elastic.py::test_two_jobs_with_one_id",
        "test_clusters_launchers.py::test_each_job_has_its_own_port",
    ),
    "port 29500 is taken": "test_clusters_launchers.py::test_a_port_that_is_taken",
    "invalid partition": "test_clusters_slurm.py::test_a_partition_that_does_not_exist",
    "`python: command not found`": "not provoked: a job of Slurm's that finds no Python at all",
    "a Job is tried a dozen times": (
        "test_clusters_kubernetes.py::test_the_status_is_the_ranks",
        "test_clusters_kubernetes.py::test_wrong_arguments_are_not_tried_again",
    ),
    "The IPv6 network addresses": (
        "test_clusters_kubernetes.py::test_a_training",
        "test_clusters_kubernetes.py::test_names_and_numbers_agree",
    ),
    "unable to allocate shared memory": "test_a_small_dev_shm",
    "8 ranks share 4 cores": (
        "test_clusters_slurm.py::test_too_few_cores_for_the_gpus_are_a_warning",
        "test_clusters_slurm.py::test_eight_gpus_get_the_cores_and_the_memory_of_a_node",
    ),
    "leaves no time to train": (
        "test_clusters_slurm.py::test_a_time_limit_before_the_first_step_is_an_error"
    ),
    "there is no new save in": (
        "test_clusters_slurm.py::test_a_job_that_saves_nothing_does_not_begin_anew"
    ),
    "3 tasks on 2 nodes": (
        "test_clusters_slurm.py::test_nodes_with_different_numbers_of_tasks_are_an_error"
    ),
    "connectFullMesh failed": "test_clusters_lab.py::test_a_host_with_several_interfaces",
    "forcefully exiting via 9": (
        "test_clusters_slurm.py::test_jobs_that_lose_their_nodes_continue_bit_for_bit"
    ),
    "ends as FAILED": (
        "test_clusters_slurm.py::test_jobs_that_lose_their_nodes_continue_bit_for_bit"
    ),
    "host7 cannot be reached": (
        "test_clusters_launchers.py::test_a_host_that_cannot_be_reached",
        "test_clusters_preflight.py::test_an_unknown_host_is_named",
    ),
    "`--workers 9": "test_clusters_ray.py::test_more_workers_than_there_are_processors",
    "`InvalidAuthToken": "not provoked: needs a second Ray, with a token",
    "timed out during startup": "not provoked: needs processors that other work keeps busy",
}


def test_a_kernel_that_allows_no_namespaces(tmp_path):
    """The cure is a machine on which this user may: there, the lab's other tests run."""
    for tool in ("nsenter", "ip", "tc"):
        (tmp_path / tool).symlink_to(shutil.which("true"))
    refuses = tmp_path / "unshare"
    refuses.write_text("#!/bin/sh\necho unshare: unshare failed: Operation not permitted\nexit 1\n")
    refuses.chmod(0o755)
    with Job([sys.executable, ROOT / "clusters/lab.py", "up", 2], PATH=str(tmp_path)) as job:
        result = job.wait(60)
    assert result.returncode == 2
    says = "no hosts could be made here: unshare: unshare failed: Operation not permitted"
    assert says in result.output


def may_mount() -> bool:
    return sys.platform == "linux" and os.geteuid() == 0 and bool(shutil.which("unshare"))


@pytest.mark.slow
@pytest.mark.skipif(not may_mount(), reason="mounts a small /dev/shm of its own, as root")
def test_a_small_dev_shm():
    """MNIST's size: a batch of 512 images of 28 x 28 numbers has 1.6 MB."""
    train = [sys.executable, ROOT / "ddp_basics/train.py", "--dataset", "synthetic"]
    train += ["--batch-size", 512, "--workers", 1, "--epochs", 1]

    def run(size: str):
        mount = f'mount -t tmpfs -o size={size} none /dev/shm && exec "$@"'
        with Job(["unshare", "--mount", "sh", "-c", mount, "sh", *train]) as job:
            return job.wait(200)

    small = run("1m")
    assert small.returncode != 0
    assert "unable to allocate shared memory(shm)" in small.output
    assert "No space left on device (28)" in small.output
    run("64m").check()
