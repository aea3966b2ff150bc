"""clusters/kubernetes/: manifests against their schemas; what their pods run, on hosts of the lab.

No Kubernetes runs here. A few lines below do with a manifest what Kubernetes would do: names
of pods, their variables, rules for failed ones. A host of the lab then stands in for each pod.
"""

import copy
import functools
import os
import re
import signal
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import lab_hosts
import pool
import pytest
import torch
from helpers import PROGRAMS, ROOT, Job, installed, learned, python
from lab_hosts import Lab, name_of
from torch.distributed.launcher.api import LaunchConfig

yaml = pytest.importorskip("yaml", reason="needs PyYAML, which transformers brings")

KUBERNETES = ROOT / "clusters/kubernetes"
TRAIN = ROOT / "ddp_basics/train.py"
MANIFESTS = ["jobset.yaml", "job", "trainjob"]
VERSION = "1.37"  # of Kubernetes, whose schemas are taken
MISSING = [name for name in ("kubernetes_validate", "kubeflow_trainer_api") if not installed(name)]
needs_schemas = pytest.mark.skipif(
    bool(MISSING), reason=f"no {MISSING} here: pip install -r requirements-clusters.txt"
)
each_manifest = pytest.mark.parametrize("file", MANIFESTS)


@functools.cache
def text_of(file: str) -> str:
    """Of a manifest, or what without_jobset.py prints."""
    if file.endswith(".yaml"):
        return (KUBERNETES / file).read_text()
    return python(KUBERNETES / "without_jobset.py", file, timeout=60).check().output


def documents(file: str) -> dict[str, dict]:
    """Those of a manifest, by their kind."""
    return {each["kind"]: each for each in yaml.safe_load_all(text_of(file))}


# ---- what the schemas say


def mistakes(document: dict) -> str:
    """What is wrong with it, as the published schema has it; nothing if it fits."""
    import kubeflow_trainer_api.models as kubeflow
    import kubernetes_validate

    kinds = {
        "JobSet": kubeflow.JobsetV1alpha2JobSet,
        "TrainJob": kubeflow.TrainerV1alpha1TrainJob,
        "TrainingRuntime": kubeflow.TrainerV1alpha1TrainingRuntime,
    }
    try:
        if document["kind"] in kinds:
            read = kinds[document["kind"]].from_dict(document).to_dict()
            return "" if read == document else "it has fields that the schema does not know"
        kubernetes_validate.validate(document, VERSION, strict=True)
    except ValueError as error:  # of pydantic
        return str(error)
    except kubernetes_validate.ValidationError as error:
        return error.message
    return ""


@pytest.mark.slow
@needs_schemas
@pytest.mark.parametrize("file", [*MANIFESTS, "runs.yaml", "networkpolicy.yaml"])
def test_manifests_fit_their_schemas(file):
    for kind, document in documents(file).items():
        assert not mistakes(document), kind


@needs_schemas
@pytest.mark.parametrize(
    ("file", "kind", "path", "key", "value"),
    [
        ("job", "Job", "spec", "completions", "two"),
        ("job", "Job", "spec template spec", "subdomian", "digits"),
        ("job", "Job", "spec podFailurePolicy rules 0 onExitCodes", "values", 2),
        ("job", "Service", "spec", "clusterIp", "None"),
        ("jobset.yaml", "JobSet", "spec replicatedJobs 0 template spec", "backofLimit", 0),
        ("networkpolicy.yaml", "NetworkPolicy", "spec", "podSelectors", {}),
        ("trainjob", "TrainJob", "spec trainer", "numNodes", "two"),
        ("trainjob", "TrainJob", "spec trainer", "script", "train.py"),
        ("trainjob", "TrainingRuntime", "spec mlPolicy torch", "numProcPerNode", 1),
    ],
)
def test_a_mistake_is_caught(file, kind, path, key, value):
    document = documents(file)[kind]
    place = document
    for step in path.split():
        place = place[int(step) if step.isdigit() else step]
    place[key] = value
    assert mistakes(document)


# ---- what Kubernetes, JobSet and Kubeflow Trainer make of a manifest


@dataclass
class Pod:
    hostname: str
    service: str
    index: int
    job: dict  # the spec of the Job that it belongs to
    more: dict = field(default_factory=dict)  # to the environment of its container

    @property
    def spec(self) -> dict:
        return self.job["template"]["spec"]

    @property
    def container(self) -> dict:
        (container,) = self.spec["containers"]
        return container

    def environment(self) -> dict[str, str]:
        told = {"JOB_COMPLETION_INDEX": str(self.index)}  # the Job controller's
        for variable in self.container.get("env", []):
            value = variable.get("value")
            if value is None:
                resource = variable["valueFrom"]["resourceFieldRef"]["resource"]
                value = self.container["resources"]["limits"][resource.removeprefix("limits.")]
            told[variable["name"]] = str(value)
        return told | self.more

    def command(self) -> list[str]:
        """With $(NAME) replaced as Kubernetes does it, without a shell."""
        told = self.environment()
        words = [*self.container["command"], *self.container["args"]]
        return [re.sub(r"\$\((\w+)\)", lambda name: told[name[1]], word) for word in words]

    def when_failed(self, status: int, disrupted: bool = False) -> str:
        """The action of the first rule that fits; Count if none does."""
        for rule in self.job["podFailurePolicy"]["rules"]:
            codes, conditions = rule.get("onExitCodes"), rule.get("onPodConditions", [])
            if codes:
                assert (codes["containerName"], codes["operator"]) == (self.container["name"], "In")
            if codes and status in codes["values"]:
                return rule["action"]
            if disrupted and {"type": "DisruptionTarget", "status": "True"} in conditions:
                return rule["action"]
        return "Count"


def pods(file: str) -> list[Pod]:
    made = documents(file)
    if "Job" in made:
        job = made["Job"]["spec"]
        return pods_of_job(
            made["Job"]["metadata"]["name"], job["template"]["spec"]["subdomain"], job
        )
    if "JobSet" in made:
        return pods_of_jobset(made["JobSet"])
    return pods_of_trainjob(made["TrainJob"], made["TrainingRuntime"])


def pods_of_job(name: str, service: str, job: dict) -> list[Pod]:
    assert job["completions"] == job["parallelism"]
    return [Pod(f"{name}-{i}", service, i, job) for i in range(job["completions"])]


def pods_of_jobset(jobset: dict) -> list[Pod]:
    name, (node,) = jobset["metadata"]["name"], jobset["spec"]["replicatedJobs"]
    assert node["replicas"] == 1
    return pods_of_job(f"{name}-{node['name']}-0", name, node["template"]["spec"])


def pods_of_trainjob(trainjob: dict, runtime: dict) -> list[Pod]:
    name, trainer = trainjob["metadata"]["name"], trainjob["spec"]["trainer"]
    assert trainjob["spec"]["runtimeRef"]["kind"] == runtime["kind"]
    assert trainjob["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert "torch" in runtime["spec"]["mlPolicy"]
    (node,) = copy.deepcopy(runtime["spec"]["template"]["spec"]["replicatedJobs"])
    label = "trainer.kubeflow.org/trainjob-ancestor-step"
    assert (node["name"], node["template"]["metadata"]["labels"][label]) == ("node", "trainer")
    job = node["template"]["spec"]
    job |= {"completions": trainer["numNodes"], "parallelism": trainer["numNodes"]}
    (container,) = job["template"]["spec"]["containers"]
    assert container["name"] == "node"
    container |= {key: trainer[key] for key in ("image", "command", "args")}
    container["resources"] = trainer["resourcesPerNode"]
    made = pods_of_jobset(
        {
            "metadata": {"name": name},
            "spec": {
                "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": job}}]
            },
        }
    )
    for pod in made:  # what Trainer's torch plugin tells the containers
        pod.more = {
            "PET_NNODES": str(trainer["numNodes"]),
            "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
            "PET_NODE_RANK": str(pod.index),
            "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
            "PET_MASTER_PORT": "29500",
        }
    return made


# ---- what no schema knows


@each_manifest
def test_names_and_numbers_agree(file):
    first, *others = pods(file)
    spec, container = first.spec, first.container
    command = first.command()
    told = {word.split("=")[0]: word.partition("=")[2] for word in command}
    if file == "trainjob":
        told |= {
            "--nnodes": first.more["PET_NNODES"],
            "--master-addr": first.more["PET_MASTER_ADDR"],
        }
    assert told["--nnodes"] == str(1 + len(others))
    assert told["--master-addr"] == f"{first.hostname}.{first.service}"
    assert all((ROOT / word).is_file() for word in command if word.endswith(".py"))
    # podFailurePolicy is for pods that are never restarted in place.
    assert spec["restartPolicy"] == "Never"
    assert first.when_failed(1) == first.when_failed(137) == "Count"
    assert first.when_failed(2) == "FailJob"
    assert first.when_failed(1, disrupted=True) == first.when_failed(143) == "Ignore"
    # Every mount has its volume, and the files that must stay lie on one.
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    claim = documents("runs.yaml")["PersistentVolumeClaim"]["metadata"]["name"]
    assert mounts["/app/runs"]["persistentVolumeClaim"]["claimName"] == claim
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    assert f"{container['workingDir']}/{told['--output-dir']}" == "/app/runs/digits"
    if file == "job":
        service = documents(file)["Service"]
        assert service["metadata"]["name"] == first.service
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["selector"] == {
            "batch.kubernetes.io/job-name": documents(file)["Job"]["metadata"]["name"]
        }


@each_manifest
def test_failures_are_counted_for_any_number_of_pods(file, monkeypatch):
    """A training fails six times at least before it has failed, with all its pods each time."""
    if file == "job":
        import_path = str(KUBERNETES)
        monkeypatch.syspath_prepend(import_path)
        import without_jobset

        many = without_jobset.jobset()
        node = many["spec"]["replicatedJobs"][0]["template"]["spec"]
        node |= {"completions": 100, "parallelism": 100}
        _, job = without_jobset.job(many)
        assert job["spec"]["backoffLimit"] >= 6 * 100
    else:
        made = documents(file)
        jobset = made.get("JobSet") or made["TrainingRuntime"]["spec"]["template"]
        assert jobset["spec"]["failurePolicy"]["maxRestarts"] == 6
        assert pods(file)[0].job["backoffLimit"] == 0  # the first failed pod is one restart


@each_manifest
def test_nothing_restarts_for_ever(file):
    """What the kubelet ends because of a probe leaves with 143 if its rank obeys SIGTERM, and that
    is not counted: there is no probe. A hang ends by the timeout of its collective, with 1."""
    assert not {"livenessProbe", "startupProbe"} & set(pods(file)[0].container)
    assert pods(file)[0].when_failed(1) == "Count"


def test_how_long_pods_wait_for_one_that_finds_no_node():
    """Each attempt ends by torchrun's timeout, with status 1, which counts."""
    minutes = LaunchConfig(1, 1, 1).rdzv_configs["timeout"] / 60
    attempts = 1 + documents("jobset.yaml")["JobSet"]["spec"]["failurePolicy"]["maxRestarts"]
    page = " ".join((ROOT / "clusters/kubernetes.md").read_text().split())
    assert f"torchrun gives up after {minutes:.0f} minutes" in page
    assert f"after seven failures ({attempts * minutes:.0f} minutes)" in page


@each_manifest
def test_all_pods_start_at_once(file):
    """Kueue's label, which it reads on JobSets, Jobs and TrainJobs: on none that another makes."""
    labels = {kind: d["metadata"].get("labels", {}) for kind, d in documents(file).items()}
    with_queue = [kind for kind, each in labels.items() if "kueue.x-k8s.io/queue-name" in each]
    assert with_queue == [{"jobset.yaml": "JobSet", "job": "Job", "trainjob": "TrainJob"}[file]]


def test_trainer_finds_the_runtime_of_a_job():
    """It refuses a TrainJob whose runtime is applied after it."""
    assert list(documents("trainjob")) == ["TrainingRuntime", "TrainJob"]


def test_the_policy_selects_the_pods():
    policy = documents("networkpolicy.yaml")["NetworkPolicy"]["spec"]
    these = {
        "jobset.sigs.k8s.io/jobset-name": documents("jobset.yaml")["JobSet"]["metadata"]["name"]
    }
    assert policy["podSelector"]["matchLabels"] == these
    (rule,) = policy["ingress"]
    assert rule == {"from": [{"podSelector": {"matchLabels": these}}]}


def test_the_image_has_what_the_manifests_want():
    lines = (KUBERNETES / "Dockerfile").read_text().splitlines()
    said = [line.split() for line in lines if line and not line.startswith("#")]
    copied = [word for words in said if words[0] == "COPY" for word in words[1:-1]]
    assert all((ROOT / name).exists() for name in copied)
    ignored = (KUBERNETES / "Dockerfile.dockerignore").read_text().splitlines()
    assert not {"ddp_basics", "clusters"} & set(ignored)
    for file in MANIFESTS:
        first = pods(file)[0]
        assert ["WORKDIR", first.container["workingDir"]] in said
        assert ["USER", str(first.spec["securityContext"]["runAsUser"])] in said
    (makes,) = [words for words in said if "install" in words and "--owner" in words]
    assert makes[-2:] == ["runs", "data"]  # the scripts' folders, in a directory of root's


def test_the_image_can_use_infiniband_and_compile():
    """No wheel brings these: without them NCCL takes TCP, and torch.compile fails."""
    lines = (KUBERNETES / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    (install,) = [line.split() for line in lines if "apt-get install" in line]
    packages = {b"libibverbs.so.1": "libibverbs1", b"libmlx5.so.1": "ibverbs-providers"}
    for library in Path(torch.__file__).parents[1].glob("nvidia/**/libnccl.so.2"):
        assert packages.keys() <= set(re.findall(rb"lib\w+\.so\.1", library.read_bytes()))
    assert {*packages.values(), "g++"} <= set(install)


# ---- the exit status of a pod


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("pass", 0),
        ("sys.exit(2)", 2),
        ("raise ValueError('a mistake')", 1),
        ("os.kill(os.getpid(), 9)", 137),
    ],
)
@pytest.mark.slow
def test_the_status_is_the_ranks(tmp_path, line, status):
    script = tmp_path / "script.py"
    script.write_text(f"import os, sys\n{line}\n")
    options = ("--standalone", "--nproc-per-node=1", script)
    result = pool.run(KUBERNETES / "agent.py", *options, timeout=60)
    assert result.returncode == status, result.output
    assert (f"{script} FAILED" in result.output) == bool(status)
    assert ("ValueError: a mistake" in result.output) == (status == 1)


@pytest.mark.slow  # with the one before, whose agent is forked: its ranks are not
def test_wrong_arguments_are_not_tried_again():
    options = ("--standalone", "--nproc-per-node=2", TRAIN, "--batch-size=65")
    result = pool.run(KUBERNETES / "agent.py", *options, timeout=60)
    assert "--batch-size 65 does not divide into 2 equal parts" in result.output
    for file in MANIFESTS:
        assert pods(file)[0].when_failed(result.returncode) == "FailJob", result.output


# Scripts that behave differently when they are asked to stop. They print when they are ready.
STOPPED = {
    "saves": ("signal.signal(15, lambda *_: (time.sleep({seconds}), sys.exit(143)))", 143),
    "has hung": ("signal.signal(15, signal.SIG_IGN)", 137),
    "does not catch it": ("", 137),
    "fails while it saves": ("signal.signal(15, lambda *_: sys.exit(28))", 28),
}


@pytest.mark.parametrize("how", STOPPED)
@pytest.mark.slow
def test_only_a_rank_that_has_ended_by_itself_has_saved(tmp_path, how):
    """143 is not counted. A rank that hangs does not save: torchrun kills it, and that counts."""
    line, status = STOPPED[how]
    ends_by_itself = status != 137  # then it has time, on a busy machine too
    stopped(tmp_path, line.format(seconds=0), seconds=60 if ends_by_itself else 1, status=status)
    for file in MANIFESTS:
        expected = {143: "Ignore"}.get(status, "Count")
        assert pods(file)[0].when_failed(status) == expected


@pytest.mark.slow
def test_a_save_may_take_longer_than_30_seconds(tmp_path):
    """As long as the manifest's variable says, which leaves some of the pod's grace period."""
    told = {pods(file)[0].environment()["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] for file in MANIFESTS}
    (seconds,) = map(int, told)
    assert {pods(file)[0].spec["terminationGracePeriodSeconds"] for file in MANIFESTS} == {
        seconds + 30
    }
    line, _ = STOPPED["saves"]
    stopped(tmp_path, line.format(seconds=33), seconds, status=143)


def stopped(folder: Path, line: str, seconds: int, status: int) -> None:
    """Run two ranks of which the second one prepares for SIGTERM with this line; send it to their
    agent, which waits `seconds` for them; compare its exit status."""
    script = folder / "script.py"
    other = "signal.signal(15, lambda *_: sys.exit(143))"
    script.write_text(
        "import os, signal, sys, time\n"
        f"if os.environ['RANK'] == '1':\n    {line or 'pass'}\nelse:\n    {other}\n"
        "print('ready', flush=True)\nwhile True:\n    time.sleep(0.1)\n"
    )
    command = [KUBERNETES / "agent.py", "--standalone", "--nproc-per-node=2", script]
    with Job(command, fork=0, TORCH_ELASTIC_SHUTDOWN_TIMEOUT=str(seconds)) as job:
        job.wait_until(lambda: job.output.count("ready") == 2, 100)
        job.process.send_signal(signal.SIGTERM)
        result = job.wait(100)
        assert not job.kill()
    assert result.returncode == status, result.output


# ---- trainings


class Hosts(Lab):
    """Two of the lab, which play pods: their names, their containers' file systems."""

    def become(self, number: int, pod: Pod, others: list[Pod]) -> None:
        """Its own name stands in a pod's /etc/hosts; those of the others come from the Service."""
        domain = f"{pod.service}.default.svc.cluster.local"
        lines = ["127.0.0.1 localhost", f"{address(pod)} {pod.hostname}.{domain} {pod.hostname}"]
        lines += [f"{address(other)} {other.hostname}.{other.service}" for other in others]
        text = "\n".join(lines)
        self.on(number, "sh", "-c", f"hostname {pod.hostname}; echo '{text}' > /etc/hosts")

    def start_pod(self, pod: Pod, app: Path) -> Job:
        # The hosts share two processors: each pod is given one, whatever its limit.
        path = os.pathsep.join([str(PROGRAMS), os.environ["PATH"]])
        environment = pod.environment() | {"OMP_NUM_THREADS": "1", "PATH": path}
        return Job(self.command(pod.index, *pod.command()), app, **environment)

    def start_all(self, these: list[Pod], app: Path, stack: ExitStack) -> list[Job]:
        """They start before the Service knows them, as it happens: their agents ask again."""
        jobs = []
        for pod in these:
            self.become(pod.index, pod, [])
            jobs.append(stack.enter_context(self.start_pod(pod, app)))
        jobs[-1].wait_until(lambda: "cannot be retrieved" in jobs[-1].output, 60)
        for pod in these:
            self.become(pod.index, pod, these)
        return jobs


def address(pod: Pod) -> str:
    return f"10.77.0.{pod.index + 1}"


@pytest.fixture(scope="module")
def hosts():
    with lab_hosts.up(Hosts(name_of("kubernetes")), 2) as hosts:
        yield hosts


@pytest.fixture
def app(tmp_path) -> Path:
    """What /app is in the image, with the volume in it."""
    folder = tmp_path / "app"
    folder.mkdir()
    for name in ("clusters", "ddp_basics"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "runs").mkdir()
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The same training on two ranks of this machine, with nothing in its way."""
    folder = tmp_path_factory.mktemp("whole")
    pool.run(TRAIN, "--epochs=2", "--log-every=1", "--output-dir", folder, ranks=2).check()
    return folder


def check_equal(folder: Path, whole: Path) -> None:
    assert learned(folder) == learned(whole)
    ends = [each / "checkpoints/step_00000044.pt" for each in (folder, whole)]
    one, other = (torch.load(end, weights_only=True)["model"] for end in ends)
    assert all(torch.equal(one[key], other[key]) for key in other)


def pods_that_log(file: str) -> list[Pod]:
    """Each step, not only the last of an epoch."""
    these = pods(file)
    these[0].container["args"].append("--log-every=1")  # there is one template for all of them
    return these


@pytest.mark.slow
@pytest.mark.parametrize(
    "file", ["jobset.yaml", pytest.param("trainjob", marks=pytest.mark.release)]
)
def test_a_training(hosts, app, whole, file):
    these = pods_that_log(file)
    with ExitStack() as stack:
        jobs = hosts.start_all(these, app, stack)
        for job in jobs:
            job.wait(90).check()
            assert not job.kill()
    check_equal(app / "runs/digits", whole)


# train.py, which does not go on from step 30 before it is asked to stop, the first time.
WAITS = """
import os, sys, time
sys.path.insert(0, {directory!r})
import train
agreed = train.StopRequests.agreed
def wait(stop, step):
    if step == 30 and not os.path.exists("runs/preempted"):
        print("at step 30", flush=True)
        until = time.monotonic() + 60
        # Only one pod is asked: the others learn of it from its rank.
        while os.environ["RANK"] == "1" and not stop.asked and time.monotonic() < until:
            time.sleep(0.01)
        stop.next_look = step
    return agreed(stop, step)
train.StopRequests.agreed = wait
train.main()
"""


@pytest.mark.release
def test_a_preempted_pod_takes_the_others_along_and_all_continue(hosts, app, whole):
    (app / "ddp_basics").unlink()
    (app / "ddp_basics").mkdir()
    (app / "ddp_basics/train.py").write_text(WAITS.format(directory=str(TRAIN.parent)))
    these = pods_that_log("job")
    with ExitStack() as stack:
        jobs = hosts.start_all(these, app, stack)
        jobs[1].wait_until(lambda: "at step 30" in jobs[1].output, 60)
        agents = [p for p in jobs[1].processes() if p.parent().name() == "nsenter"]
        assert len(agents) == 1, jobs[1].processes()
        agents[0].send_signal(signal.SIGTERM)  # as the kubelet does, to a container's process 1
        statuses = [job.wait(60).returncode for job in jobs]
        said = jobs[0].output
        assert statuses == [143, 143], said + jobs[1].output
        assert not any(job.kill() for job in jobs)
    assert "stopped by SIGTERM after step 30 of 44: saved to runs/digits/checkpoints" in said
    # One was the target of a disruption, the other was not: neither counts, both are recreated.
    assert these[1].when_failed(143, disrupted=True) == these[0].when_failed(143) == "Ignore"
    (app / "runs/preempted").touch()
    with ExitStack() as stack:
        for job in hosts.start_all(these, app, stack):
            job.wait(90).check()
            assert not job.kill()
    check_equal(app / "runs/digits", whole)
