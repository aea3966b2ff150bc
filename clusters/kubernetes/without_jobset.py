"""Convert jobset.yaml for a cluster without JobSet, or with Kubeflow Trainer, and print it.

    python clusters/kubernetes/without_jobset.py job | kubectl apply -f -
    python clusters/kubernetes/without_jobset.py trainjob > trainjob.yaml

job: an Indexed Job and a headless Service, for plain Kubernetes. trainjob: a TrainingRuntime,
which a cluster's administrator writes once, and the few lines of each training job.
"""

import argparse
from pathlib import Path

import yaml  # PyYAML

RETRIES = 6  # of the whole job


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=["job", "trainjob"], help="kind of manifest to print")
    documents = {"job": job, "trainjob": trainjob}[parser.parse_args().kind](jobset())
    print(yaml.safe_dump_all(documents, sort_keys=False), end="")


def jobset() -> dict:
    return yaml.safe_load(Path(__file__).with_name("jobset.yaml").read_text())


def job(jobset: dict) -> list[dict]:
    """Pods are replaced one by one: when one fails, the other pods lose its ranks and fail, too."""
    name, node = jobset["metadata"]["name"], jobset["spec"]["replicatedJobs"][0]
    spec = node["template"]["spec"]
    spec["backoffLimit"] = RETRIES * spec["completions"]  # it counts pods, and all pods fail
    pod = spec["template"]["spec"]
    pod["subdomain"] = name  # the Service below, which JobSet would make
    container = pod["containers"][0]
    first = f"{name}-{node['name']}-0-0.{name}"  # JobSet's name; a Job's is its own name and number
    container["args"] = [word.replace(first, f"{name}-0.{name}") for word in container["args"]]
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {
            "clusterIP": "None",  # headless: a name for each pod, digits-0.digits
            "publishNotReadyAddresses": True,  # from the beginning: no pod is ready before
            "selector": {"batch.kubernetes.io/job-name": name},
        },
    }
    return [service, {"apiVersion": "batch/v1", "kind": "Job", **metadata(jobset), "spec": spec}]


def trainjob(jobset: dict) -> list[dict]:
    """Trainer makes a JobSet of the two. It sets torchrun's options by variables: PET_NNODES,
    PET_NPROC_PER_NODE, PET_NODE_RANK, PET_MASTER_ADDR, PET_MASTER_PORT."""
    version = {"apiVersion": "trainer.kubeflow.org/v1alpha1"}
    (node,) = jobset["spec"]["replicatedJobs"]
    del node["replicas"]
    # The TrainJob's trainer goes here; Trainer looks for a container named "node".
    node["template"] |= {"metadata": {"labels": {TRAINER: "trainer"}}}
    spec = node["template"]["spec"]
    pods = spec.pop("completions")
    del spec["parallelism"], spec["completionMode"]
    container = spec["template"]["spec"]["containers"][0]
    command, words = container.pop("command"), container.pop("args")
    script = next(i for i, word in enumerate(words) if not word.startswith("--"))
    torchrun = dict(word.removeprefix("--").split("=", 1) for word in words[:script])
    trainer = {
        "image": container["image"],
        "numNodes": pods,
        "numProcPerNode": int(torchrun["nproc-per-node"]),
        "command": command,
        "args": words[script:],
        "resourcesPerNode": container.pop("resources"),
    }
    policy = {"numNodes": 1, "torch": {}}  # unless the TrainJob says otherwise
    runtime = {
        **version,
        "kind": "TrainingRuntime",
        "metadata": {
            "name": "torch-that-continues",
            "labels": {"trainer.kubeflow.org/framework": "torch"},
        },
        "spec": {"mlPolicy": policy, "template": {"spec": jobset["spec"]}},
    }
    reference = {"kind": "TrainingRuntime", "name": runtime["metadata"]["name"]}
    training = {"runtimeRef": reference, "trainer": trainer}
    # In this order: Trainer refuses a TrainJob whose runtime does not exist yet.
    return [runtime, {**version, "kind": "TrainJob", **metadata(jobset), "spec": training}]


TRAINER = "trainer.kubeflow.org/trainjob-ancestor-step"


def metadata(jobset: dict) -> dict:
    """The JobSet's name, and the label of its Kueue queue, also for Jobs and TrainJobs."""
    return {"metadata": jobset["metadata"]}


if __name__ == "__main__":
    main()
