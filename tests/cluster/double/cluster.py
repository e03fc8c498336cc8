"""Nodes and controllers around the API server: pods that run scripts, jobs that make pods, an owner's collector."""

import copy
import fnmatch
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from double import schema, tls
from double.container_log import ContainerLog
from double.server import Answer, CloseAbruptly, Request, Server, failure
from double.store import Object, Resource, now

TRAINJOB = Resource("trainer.kubeflow.org", "v1alpha1", "trainjobs", "TrainJob", crd="trainjobs.yaml")
RUNTIME = Resource(
    "trainer.kubeflow.org", "v1alpha1", "trainingruntimes", "TrainingRuntime", crd="trainingruntimes.yaml"
)
PYTORCHJOB = Resource("kubeflow.org", "v1", "pytorchjobs", "PyTorchJob", crd="pytorchjobs.yaml")
PODS = Resource("", "v1", "pods", "Pod")
EVENTS = Resource("", "v1", "events", "Event")
SECRETS = Resource("", "v1", "secrets", "Secret")
QUOTAS = Resource("", "v1", "resourcequotas", "ResourceQuota")
CLAIMS = Resource("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim")
WORKFLOWS = Resource("argoproj.io", "v1alpha1", "workflows", "Workflow")
CRDS = Resource("apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", namespaced=False)
REVIEWS = Resource(
    "authorization.k8s.io", "v1", "selfsubjectaccessreviews", "SelfSubjectAccessReview", namespaced=False
)
ALL = (TRAINJOB, RUNTIME, PYTORCHJOB, PODS, EVENTS, SECRETS, QUOTAS, CLAIMS, WORKFLOWS, CRDS, REVIEWS)

Script = Callable[["JobHandle"], None]


class Cluster(Server):
    """The whole double. Use `running()`; `api_client()` gives a real client that trusts it.

    Args:
        folder: for certificates.
        trainjob_crd: which release's CRD is installed; "" for none.
    """

    pods = PODS

    def __init__(self, folder: Path, trainjob_crd: str = "trainjobs.yaml") -> None:
        context, self.ca_file = tls.make(folder)
        super().__init__(context)
        self.port = self.server_address[1]
        self.trainjob_crd = trainjob_crd
        groups = [r for r in ALL if trainjob_crd or r.group != "trainer.kubeflow.org"]
        self.resources = tuple(groups)
        self.denied: list[tuple[str, str, str]] = []
        self.faults: list[Callable[[Request], None]] = []
        self.answered: list[tuple[Request, int]] = []
        self.on_answer: Callable[[Request, int], None] = lambda _request, _status: None
        self.scripts: list[Script] = []
        self.logs: dict[tuple[str, str], list[ContainerLog]] = {}
        self.problems: list[BaseException] = []
        self.grace_seconds = 0.2
        self._listener: threading.Thread | None = None
        self._collector = threading.Thread(target=self._collect, daemon=True)
        for resource in self.resources:
            if resource.crd:
                body = copy.deepcopy(schema.load_crd(self._file(resource)))
                self.store.put(CRDS, body)

    # -- life ------------------------------------------------------------------------------------------

    @contextmanager
    def running(self) -> Any:
        self._listen()
        self._collector.start()
        try:
            yield self
        finally:
            self.stopping = True
            self.down()
            for logs in list(self.logs.values()):
                for log in logs:
                    log.end()
        if self.problems:
            raise self.problems[0]

    def _listen(self) -> None:
        self._listener = threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True)
        self._listener.start()

    def down(self) -> None:
        """Stop listening and break every connection; the objects stay."""
        self.shutdown()
        self.server_close()
        with self.guard:
            connections = list(self.connections)
        for connection in connections:
            self.drop(connection)

    def up(self) -> None:
        """Listen again on the same port."""
        import socket

        self.socket = socket.socket(self.address_family, self.socket_type)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.server_address = ("127.0.0.1", self.port)
        self.server_bind()
        self.server_activate()
        self._listen()

    def outage(self, seconds: float) -> None:
        self.down()
        time.sleep(seconds)
        self.up()

    def cut_streams(self, style: str = "clean") -> int:
        """End all open watches and log streams now; returns how many."""
        with self.guard:
            streams = list(self.streams)
        for stream in streams:
            stream.cut = style
        return len(streams)

    def api_client(self) -> Any:
        from kubernetes import client

        configuration = client.Configuration()
        configuration.host = f"https://127.0.0.1:{self.port}"
        configuration.ssl_ca_cert = str(self.ca_file)
        configuration.api_key = {"authorization": f"Bearer {self.token}"}
        configuration.retries = False
        configuration.connection_pool_maxsize = 64
        return client.ApiClient(configuration)

    def kubeconfig(self, folder: Path, namespace: str = "ns1") -> Path:
        """A kubeconfig file, for launchers in processes of their own."""
        path = folder / "kubeconfig"
        path.write_text(
            "apiVersion: v1\nkind: Config\ncurrent-context: c\n"
            f"clusters: [{{name: c, cluster: {{server: 'https://127.0.0.1:{self.port}', "
            f"certificate-authority: '{self.ca_file}'}}}}]\n"
            f"users: [{{name: u, user: {{token: '{self.token}'}}}}]\n"
            f"contexts: [{{name: c, context: {{cluster: c, user: u, namespace: {namespace}}}}}]\n"
        )
        return path

    # -- what Server asks --------------------------------------------------------------------------------

    def resource(self, group: str, version: str, plural: str) -> Resource | None:
        found = [r for r in self.resources if (r.group, r.version, r.plural) == (group, version, plural)]
        return found[0] if found else None

    def _file(self, resource: Resource) -> str:
        return self.trainjob_crd if resource is TRAINJOB else resource.crd

    def schema(self, resource: Resource) -> Object:
        version = schema.load_crd(self._file(resource))["spec"]["versions"][0]
        return version["schema"]["openAPIV3Schema"]

    def may(self, verb: str, group: str, plural: str, sub: str = "") -> bool:
        what = f"{plural}/{sub}" if sub else plural
        return not any(
            fnmatch.fnmatch(verb, v) and fnmatch.fnmatch(group, g) and fnmatch.fnmatch(what, r)
            for v, g, r in self.denied
        )

    def before(self, request: Request) -> None:
        for fault in list(self.faults):
            fault(request)

    def after(self, request: Request, status: int) -> None:
        self.answered.append((request, status))
        self.on_answer(request, status)

    def on_created(self, resource: Resource, body: Object) -> None:
        if resource in (TRAINJOB, PYTORCHJOB) and self.scripts:
            script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
            threading.Thread(target=self._run, args=(script, JobHandle(self, resource, body)), daemon=True).start()

    def _run(self, script: Script, job: "JobHandle") -> None:
        try:
            script(job)
        except Exception as error:
            if not self.stopping:
                self.problems.append(error)

    def container_log(self, uid: str, container: str, previous: bool, waiting: bool) -> ContainerLog | None:
        """The log a request gets: in a crash loop's wait that of the last dead run."""
        runs = self.logs.get((uid, container), [])
        back = 2 if previous and not waiting else 1
        return runs[-back] if len(runs) >= back else None

    def delete_pod(self, body: Object) -> Object:
        """Graceful deletion: the pod stays until the kubelet has ended it."""
        meta, status = body["metadata"], body.get("status", {})
        if status.get("phase") in ("Succeeded", "Failed") or not body["spec"].get("nodeName"):
            self.store.remove(PODS, meta["namespace"], meta["name"])
            return body | {"metadata": meta | {"deletionTimestamp": now(), "deletionGracePeriodSeconds": 0}}
        if "deletionTimestamp" not in meta:
            meta |= {"deletionTimestamp": now(), "deletionGracePeriodSeconds": 30}
            body = self.store.put(PODS, body)
            pod = PodHandle(self, meta["namespace"], meta["name"], meta["uid"])
            threading.Timer(self.grace_seconds, pod.terminate).start()
        return body

    def _collect(self) -> None:
        """The garbage collector: dependants of owners that are gone, and foreground deletion."""
        while not self.stopping:
            time.sleep(0.1)
            with self.store.lock:
                bodies = list(self.store.objects.items())
                uids = {body["metadata"]["uid"] for _, body in bodies}
                for (plural, namespace, name), body in bodies:
                    owners = body["metadata"].get("ownerReferences") or []
                    resource = next((r for r in self.resources if r.plural == plural), None)
                    if resource is None:
                        continue
                    if owners and not any(owner["uid"] in uids for owner in owners):
                        if resource is PODS:
                            self.delete_pod(copy.deepcopy(body))
                        else:
                            self.store.remove(resource, namespace, name)
                    elif "foregroundDeletion" in (body["metadata"].get("finalizers") or []):
                        mine = [
                            b
                            for _, b in bodies
                            if any(
                                o["uid"] == body["metadata"]["uid"] for o in b["metadata"].get("ownerReferences") or []
                            )
                        ]
                        for dependant in mine:
                            if dependant.get("spec", {}).get("containers"):
                                self.delete_pod(copy.deepcopy(dependant))
                        if not mine:
                            self.store.remove(resource, namespace, name)

    # -- faults --------------------------------------------------------------------------------------------

    def fail_next(
        self, count: int, status: int, *, match: Callable[[Request], bool] = lambda _r: True, retry_after: str = ""
    ) -> None:
        """Answer the next `count` matching requests with an error; status 0 breaks the connection."""
        left = [count]

        def fault(request: Request) -> None:
            if left[0] > 0 and match(request):
                left[0] -= 1
                if status == 0:
                    raise CloseAbruptly
                reasons = {401: "Unauthorized", 429: "TooManyRequests", 500: "InternalError", 503: "ServiceUnavailable"}
                headers = {"Retry-After": retry_after} if retry_after else {}
                raise Answer(status, failure(status, reasons.get(status, "InternalError"), f"fault {status}"), headers)

        self.faults.append(fault)

    def event(self, namespace: str, involved: Object, reason: str, message: str, kind: str = "Warning") -> None:
        self.store.put(
            EVENTS,
            {
                "apiVersion": "v1",
                "kind": "Event",
                "type": kind,
                "reason": reason,
                "message": message,
                "involvedObject": involved,
                "metadata": {"namespace": namespace, "name": f"e{self.store.version}"},
            },
        )


class PodHandle:
    """The kubelet's hand on one pod."""

    def __init__(self, cluster: Cluster, namespace: str, name: str, uid: str) -> None:
        self.cluster, self.namespace, self.name, self.uid = cluster, namespace, name, uid

    @property
    def body(self) -> Object | None:
        body = self.cluster.store.get(PODS, self.namespace, self.name)
        return body if body and body["metadata"]["uid"] == self.uid else None

    @property
    def container(self) -> str:
        return self.logs_key[1]

    @property
    def logs_key(self) -> tuple[str, str]:
        body = self.body
        name = (
            body["spec"]["containers"][0]["name"] if body else next(k[1] for k in self.cluster.logs if k[0] == self.uid)
        )
        return self.uid, name

    @property
    def log(self) -> ContainerLog:
        return self.cluster.logs[self.logs_key][-1]

    def change(self, act: Callable[[Object], None]) -> None:
        with self.cluster.store.lock:
            body = self.body
            if body is not None:
                act(body)
                self.cluster.store.put(PODS, body)

    def condition(self, kind: str, status: str, reason: str, message: str = "") -> None:
        def act(body: Object) -> None:
            conditions = [c for c in body["status"].get("conditions", []) if c["type"] != kind]
            conditions.append(
                {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": now()}
            )
            body["status"]["conditions"] = conditions

        self.change(act)

    def unschedulable(self, message: str) -> None:
        self.condition("PodScheduled", "False", "Unschedulable", message)

    def schedule(self, node: str = "node-1") -> None:
        def act(body: Object) -> None:
            body["spec"]["nodeName"] = node
            body["status"]["conditions"] = [
                {"type": "PodScheduled", "status": "True", "reason": "", "lastTransitionTime": now()}
            ]
            self._state(body, {"waiting": {"reason": "ContainerCreating"}})

        self.change(act)

    def waiting(self, reason: str, message: str = "") -> None:
        self.change(lambda body: self._state(body, {"waiting": {"reason": reason, "message": message}}))

    def start(self) -> None:
        body = self.body
        if body is None:
            return
        if not body["spec"].get("nodeName"):
            self.schedule()
        self.cluster.logs.setdefault(self.logs_key, []).append(ContainerLog())

        def act(body: Object) -> None:
            body["status"]["phase"] = "Running"
            self._state(body, {"running": {"startedAt": now()}})

        self.change(act)

    def write(self, text: str | bytes, **options: Any) -> None:
        self.log.write(text.encode() if isinstance(text, str) else text, **options)

    def exit(self, code: int, reason: str = "", message: str = "", signal: int | None = None) -> None:
        """The container ends and so does the pod."""
        end = {
            "exitCode": code,
            "reason": reason or ("Completed" if code == 0 else "Error"),
            "finishedAt": now(),
            "startedAt": now(),
        }
        if message:
            end["message"] = message
        if signal:
            end["signal"] = signal

        def act(body: Object) -> None:
            body["status"]["phase"] = "Succeeded" if code == 0 else "Failed"
            self._state(body, {"terminated": end})

        self.log.end()
        self.change(act)

    def restart(self, code: int = 1, reason: str = "Error") -> None:
        """The container ends and starts again, as under restartPolicy OnFailure."""
        self.log.end()
        self.cluster.logs[self.logs_key].append(ContainerLog())

        def act(body: Object) -> None:
            status = body["status"]["containerStatuses"][0]
            status["lastState"] = {"terminated": {"exitCode": code, "reason": reason, "finishedAt": now()}}
            status["restartCount"] += 1
            status["containerID"] = f"containerd://{self.name}-{status['restartCount']}"
            status["state"] = {"running": {"startedAt": now()}}

        self.change(act)

    def disrupt(self, condition: str, *, pod_reason: str = "", message: str = "", code: int | None = 137) -> None:
        """Taken from outside: condition DisruptionTarget, and the pod fails."""
        self.condition("DisruptionTarget", "True", condition, message)

        def act(body: Object) -> None:
            body["status"]["phase"] = "Failed"
            if pod_reason:
                body["status"] |= {"reason": pod_reason, "message": message}
            if code is not None and (self.uid, self.container) in self.cluster.logs:
                self._state(body, {"terminated": {"exitCode": code, "reason": "Error", "finishedAt": now()}})

        for log in self.cluster.logs.get(self.logs_key, []):
            log.end()
        self.change(act)

    def terminate(self) -> None:
        """The end of a graceful deletion."""
        body = self.body
        if body is None:
            return
        if self.cluster.logs.get(self.logs_key) and body["status"].get("phase") == "Running":
            self.exit(143)
        self.cluster.store.remove(PODS, self.namespace, self.name)

    def delete(self) -> None:
        body = self.body
        if body is not None:
            self.cluster.delete_pod(body)

    def _state(self, body: Object, state: Object) -> None:
        statuses = body["status"].setdefault("containerStatuses", [])
        if not statuses:
            statuses.append(
                {
                    "name": body["spec"]["containers"][0]["name"],
                    "restartCount": 0,
                    "lastState": {},
                    "ready": False,
                    "image": "x",
                    "imageID": "",
                    "containerID": "",
                }
            )
        statuses[0]["state"] = state
        if "waiting" not in state:
            statuses[0]["containerID"] = statuses[0]["containerID"] or f"containerd://{self.name}"


class JobHandle:
    """The training operator's hand on one job."""

    def __init__(self, cluster: Cluster, resource: Resource, body: Object) -> None:
        self.cluster, self.resource, self.body = cluster, resource, body
        self.namespace, self.name = body["metadata"]["namespace"], body["metadata"]["name"]

    @property
    def environment(self) -> dict[str, str]:
        if self.resource is TRAINJOB:
            entries = self.body["spec"]["trainer"]["env"]
        else:
            entries = self.body["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]["env"]
        return {entry["name"]: entry.get("value", "") for entry in entries}

    @property
    def command(self) -> list[str]:
        if self.resource is TRAINJOB:
            return self.body["spec"]["trainer"]["command"]
        return self.body["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]["command"]

    def make_pods(self) -> list[PodHandle]:
        """One pod a rank, labelled as the real controllers label them, Pending."""
        pods = []
        for rank in range(self._ranks()):
            labels, name = self._identity(rank)
            container = "node" if self.resource is TRAINJOB else "pytorch"
            meta = self.body["metadata"]
            made = self.cluster.store.put(
                PODS,
                {
                    "apiVersion": "v1",
                    "kind": "Pod",
                    "metadata": {
                        "name": name,
                        "namespace": self.namespace,
                        "labels": labels,
                        "ownerReferences": [
                            {
                                "apiVersion": self.resource.api_version,
                                "kind": self.resource.kind,
                                "name": meta["name"],
                                "uid": meta["uid"],
                            }
                        ],
                    },
                    "spec": {"containers": [{"name": container, "image": "x"}], "restartPolicy": "Never"},
                    "status": {"phase": "Pending"},
                },
            )
            pods.append(PodHandle(self.cluster, self.namespace, name, made["metadata"]["uid"]))
        return pods

    def start(self) -> list[PodHandle]:
        pods = self.make_pods()
        for pod in pods:
            pod.start()
        return pods

    def complete(self) -> None:
        self._condition("Complete" if self.resource is TRAINJOB else "Succeeded", "JobsCompleted", "done")

    def fail(self, reason: str = "FailedJobs", message: str = "jobset failed due to one or more job failures") -> None:
        self._condition("Failed", reason, message)

    def fail_as_jobset(self, pods: list[PodHandle]) -> None:
        """What a failed pod does to the others at backoffLimit 0: they are deleted at once; the failed one stays."""
        for pod in pods:
            body = pod.body
            if body and body["status"].get("phase") not in ("Failed", "Succeeded"):
                pod.delete()
        self.fail()

    def suspend(self, message: str) -> None:
        self._condition("Suspended", "Suspended", message)

    def resume(self) -> None:
        self._condition("Suspended", "Resumed", "resumed", "False")

    def delete(self) -> None:
        self.cluster.store.remove(self.resource, self.namespace, self.name)

    def _condition(self, kind: str, reason: str, message: str, status: str = "True") -> None:
        with self.cluster.store.lock:
            body = self.cluster.store.get(self.resource, self.namespace, self.name)
            if body is None:
                return
            conditions = [c for c in body.setdefault("status", {}).get("conditions", []) if c["type"] != kind]
            # In front: a launcher that reads only the last condition must fail here.
            conditions.insert(
                0, {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": now()}
            )
            body["status"]["conditions"] = conditions
            self.cluster.store.put(self.resource, body)

    def _ranks(self) -> int:
        if self.resource is TRAINJOB:
            return int(self.body["spec"]["trainer"]["numNodes"])
        return sum(replica["replicas"] for replica in self.body["spec"]["pytorchReplicaSpecs"].values())

    def _identity(self, rank: int) -> tuple[dict[str, str], str]:
        if self.resource is TRAINJOB:
            labels = {
                "jobset.sigs.k8s.io/jobset-name": self.name,
                "jobset.sigs.k8s.io/replicatedjob-name": "node",
                "batch.kubernetes.io/job-completion-index": str(rank),
            }
            return labels, f"{self.name}-node-0-{rank}-{self.body['metadata']['uid'][:5]}"
        kind, index = ("master", 0) if rank == 0 else ("worker", rank - 1)
        labels = {
            "training.kubeflow.org/job-name": self.name,
            "training.kubeflow.org/replica-type": kind,
            "training.kubeflow.org/replica-index": str(index),
            "training.kubeflow.org/operator-name": "pytorchjob-controller",
        }
        return labels, f"{self.name}-{kind}-{index}"
