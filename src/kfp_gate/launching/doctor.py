"""Everything about a cluster that can be known to fail later, asked before anything is created.

Permissions are asked with SelfSubjectAccessReview, never by trying. The same checks run from a laptop
(`kfp-gate doctor`) and from the launcher's own step.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from kfp_gate.errors import InvalidInput, Problem, Unavailable
from kfp_gate.launching import trainjob
from kfp_gate.launching.api import Api, Refused, connect
from kfp_gate.launching.kinds import KINDS
from kfp_gate.launching.options import LaunchOptions
from kfp_gate.launching.reachable import check_storage, check_tracking
from kfp_gate.launching.worker_pod import DEFAULT_SECRET

REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
UNITS = {"": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "Ki": 2.0**10, "Mi": 2.0**20,
         "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """One thing looked at: what, why it is so or matters, and what cures it."""

    level: Literal["ok", "warning", "error"]
    what: str
    why: str = ""
    cure: str = ""


def doctor(options: LaunchOptions, *, tracking_uri: str = "", api: Api | None = None) -> list[Finding]:
    """Look at everything a launch with these options needs; nothing is changed but one probe object in storage.

    Raises:
        InvalidInput: there is no cluster to ask.
        Unavailable: it does not answer.
    """
    api, own_namespace = (api, "default") if api is not None else connect()
    namespace = options.namespace or own_namespace
    findings = [_version(api)]
    findings += _kind(api, options)
    findings += _permissions(api, options, namespace)
    if options.backend == "trainjob":
        findings += check_runtime(api, options.runtime, namespace)
    findings += _secrets(api, options, namespace)
    findings += _claims(api, options, namespace)
    findings += _quota(api, options, namespace)
    findings += _queue(api, options, namespace)
    findings += [Finding(*row) for row in (check_storage(options.checkpoint_uri), check_tracking(tracking_uri)) if row]
    return findings


def refuse_errors(findings: list[Finding], where: str) -> None:
    """Stop if something is wrong.

    Raises:
        InvalidInput: with all errors among the findings.
    """
    wrong = [finding for finding in findings if finding.level == "error"]
    if wrong:
        raise InvalidInput(
            f"{len(wrong)} thing{'s' if len(wrong) > 1 else ''} in the cluster would make this launch fail",
            expected="a namespace prepared as docs/cluster.md says", where=where,
            next_step="cure what is listed, then run kfp-gate doctor again",
            problems=[Problem(finding.what, f"{finding.why}; {finding.cure}") for finding in wrong],
        )  # fmt: skip


def text(findings: list[Finding]) -> str:
    """One line a finding; cures below what is not well."""
    marks = {"ok": "ok     ", "warning": "warning", "error": "ERROR  "}
    lines = []
    for finding in findings:
        lines.append(f"{marks[finding.level]}  {finding.what}" + (f": {finding.why}" if finding.why else ""))
        if finding.level != "ok" and finding.cure:
            lines.append(f"         {finding.cure}")
    return "\n".join(lines)


def _version(api: Api) -> Finding:
    try:
        version = api.once("GET", "/version")
    except Refused as refused:
        return Finding("warning", "API server", str(refused), "check the credentials")
    except Exception as error:
        raise Unavailable(
            f"the Kubernetes API does not answer: {error}", expected="an answer", where="/version",
            next_step="check KUBECONFIG, VPN and the cluster",
        ) from None  # fmt: skip
    return Finding("ok", "API server", str(version.get("gitVersion", "")))


def _kind(api: Api, options: LaunchOptions) -> Iterator[Finding]:
    kind = KINDS.get(options.backend)
    if kind is None:
        yield Finding("error", "backend", f"{options.backend!r} uses no cluster", "use trainjob or pytorchjob")
        return
    if options.backend == "trainjob":
        try:
            fields = trainjob.spec_fields(api)
            yield Finding("ok", "Kubeflow Trainer", f"TrainJob with {trainjob.override_field(fields)}")
        except InvalidInput as error:
            yield Finding("error", "Kubeflow Trainer", error.found, error.next_step)
        return
    try:
        found = api.call("GET", kind.group)
        served = any(resource.get("name") == kind.plural for resource in found.get("resources", ()))
    except Refused:
        served = False
    if served:
        yield Finding("ok", "Kubeflow Training Operator", "PyTorchJob v1")
    else:
        yield Finding("error", "Kubeflow Training Operator", "no PyTorchJob is served", "install it, or use trainjob")


def needed(options: LaunchOptions) -> list[tuple[str, str, str, str, bool]]:
    """Permissions: verb, group, resource, subresource, and whether a launch fails without it."""
    group, plural = (
        ("trainer.kubeflow.org", "trainjobs") if options.backend == "trainjob" else ("kubeflow.org", "pytorchjobs")
    )
    rows = [(verb, group, plural, "", True) for verb in ("create", "get", "list", "patch", "delete")]
    rows += [(verb, "", "pods", "", True) for verb in ("get", "list", "watch", "delete")]
    rows += [("get", "", "pods", "log", True)]
    if options.backend == "trainjob":
        rows += [("get", "trainer.kubeflow.org", "trainingruntimes", "", True)]
    rows += [("list", "", "events", "", False), ("get", "argoproj.io", "workflows", "", False)]
    return rows


def _permissions(api: Api, options: LaunchOptions, namespace: str) -> Iterator[Finding]:
    missing = 0
    for verb, group, resource, sub, vital in needed(options):
        attributes = {"verb": verb, "group": group, "resource": resource, "namespace": namespace}
        if sub:
            attributes["subresource"] = sub
        body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview",
                "spec": {"resourceAttributes": attributes}}  # fmt: skip
        name = f"{resource}/{sub}" if sub else resource
        try:
            answer = api.call("POST", REVIEWS, body=body)
        except Refused as refused:
            yield Finding("warning", "permissions", f"could not be asked: {refused}", "check the credentials")
            return
        if not (answer.get("status") or {}).get("allowed"):
            missing += 1
            yield Finding(
                "error" if vital else "warning", f"permission to {verb} {name}{f'.{group}' if group else ''}",
                f"missing in namespace {namespace}", "kubectl apply -k deploy/ (docs/cluster.md)",
            )  # fmt: skip
    if not missing:
        yield Finding("ok", "permissions", f"all {len(needed(options))} granted in namespace {namespace}")


def check_runtime(api: Api, name: str, namespace: str) -> Iterator[Finding]:
    """Whether the TrainingRuntime is there and keeps a dead pod's evidence."""
    what = f"TrainingRuntime {namespace}/{name}"
    try:
        body = api.find(f"{trainjob.GROUP}/namespaces/{namespace}/trainingruntimes/{name}")
    except Refused as refused:
        # Not an error: the server itself refuses a job whose runtime is missing.
        yield Finding("warning", what, f"could not be read: {refused}", "kubectl apply -k deploy/ (docs/cluster.md)")
        return
    if body is None:
        yield Finding("error", what, "does not exist", "kubectl apply -k deploy/, or set runtime to one that exists")
        return
    template = ((body.get("spec") or {}).get("template") or {}).get("spec") or {}
    jobs = [job for job in template.get("replicatedJobs") or () if job.get("name") == "node"]
    if not jobs:
        yield Finding("error", what, "has no replicated job named 'node'", "copy deploy/training-runtime.yaml")
        return
    job = (jobs[0].get("template") or {}).get("spec") or {}
    pod = ((job.get("template") or {}).get("spec")) or {}
    names = [container.get("name") for container in pod.get("containers") or ()]
    wrong = []
    if pod.get("restartPolicy") != "Never":
        wrong.append("restartPolicy is not Never: a restarted container loses its log")
    if job.get("backoffLimit") != 0:
        wrong.append("backoffLimit is not 0: at the limit the crashed pod is deleted with its log")
    if (template.get("failurePolicy") or {}).get("maxRestarts", 0) != 0:
        wrong.append("failurePolicy.maxRestarts is not 0: restarts are the launcher's, which keep the evidence")
    if wrong:
        yield Finding("warning", what, "; ".join(wrong), "copy deploy/training-runtime.yaml")
    if trainjob.CONTAINER not in names:
        yield Finding(
            "error", what, f"containers {names}: none is named 'node'", "only `node` gets the ranks' variables"
        )
    elif not wrong:
        yield Finding("ok", what, "no restarts, evidence is kept")


def _secrets(api: Api, options: LaunchOptions, namespace: str) -> Iterator[Finding]:
    for name in options.secrets or (DEFAULT_SECRET,):
        what = f"Secret {namespace}/{name}"
        try:
            found = api.find(f"/api/v1/namespaces/{namespace}/secrets/{name}")
        except Refused:
            yield Finding("ok", what, "may not be read from here, which is fine: pods refer to it by name")
            continue
        if found is not None:
            yield Finding("ok", what)
        elif options.secrets:
            yield Finding("error", what, "does not exist", f"kubectl -n {namespace} create secret generic {name} ...")
        else:
            yield Finding(
                "warning", what, "does not exist: ranks get no credentials from it", "docs/cluster.md, Credentials"
            )


def _claims(api: Api, options: LaunchOptions, namespace: str) -> Iterator[Finding]:
    for name in options.claims:
        what = f"PersistentVolumeClaim {namespace}/{name}"
        try:
            found = api.find(f"/api/v1/namespaces/{namespace}/persistentvolumeclaims/{name}")
        except Refused:
            yield Finding("warning", what, "may not be read from here", "")
            continue
        if found is None:
            yield Finding("error", what, "does not exist", "create it, or correct the mount")
        else:
            modes = (found.get("spec") or {}).get("accessModes") or []
            many = options.nodes == 1 or any(mode in ("ReadWriteMany", "ReadOnlyMany") for mode in modes)
            if many:
                yield Finding("ok", what)
            else:
                yield Finding(
                    "warning", what, f"access modes {modes}: pods on other nodes cannot mount it", "use ReadWriteMany"
                )


def _quota(api: Api, options: LaunchOptions, namespace: str) -> Iterator[Finding]:
    try:
        quotas = api.call("GET", f"/api/v1/namespaces/{namespace}/resourcequotas").get("items", ())
    except Refused:
        yield Finding("warning", "quota", "may not be read from here", "a full quota shows as pods that never appear")
        return
    asked = {"memory": quantity(options.memory) * options.nodes, "cpu": quantity(options.cpu) * options.nodes,
             "nvidia.com/gpu": float(options.gpus_per_node * options.nodes), "pods": float(options.nodes)}  # fmt: skip
    tight = False
    for body in quotas:
        status = body.get("status") or {}
        hard, used = status.get("hard") or (body.get("spec") or {}).get("hard") or {}, status.get("used") or {}
        for key, limit in hard.items():
            name = key.removeprefix("requests.").removeprefix("limits.")
            free = quantity(str(limit)) - quantity(str(used.get(key, "0")))
            if name in asked and asked[name] > free and not (key.startswith("limits.") and name == "cpu"):
                tight = True
                full = asked[name] > quantity(str(limit))
                yield Finding(
                    "error" if full else "warning", f"quota {body['metadata']['name']}, {key}",
                    f"{limit} in all, {used.get(key, '0')} used, this launch asks for {_shown(name, asked[name])}",
                    "ask for less, or have the quota raised" if full else "wait until others end, or ask for less",
                )  # fmt: skip
    if not tight:
        yield Finding("ok", "quota", "leaves room" if quotas else "none set")


def _queue(api: Api, options: LaunchOptions, namespace: str) -> Iterator[Finding]:
    if not options.queue:
        return
    what = f"LocalQueue {namespace}/{options.queue}"
    found = None
    for version in ("v1beta2", "v1beta1"):
        try:
            found = found or api.find(
                f"/apis/kueue.x-k8s.io/{version}/namespaces/{namespace}/localqueues/{options.queue}"
            )
        except Refused:
            yield Finding("warning", what, "may not be read from here", "")
            return
    if found is None:
        yield Finding(
            "error",
            what,
            "does not exist, or Kueue is not installed: the job would wait for ever",
            "kubectl get localqueues",
        )
    else:
        yield Finding("ok", what)


def _shown(name: str, value: float) -> str:
    return f"{value / 2**30:g}Gi" if name == "memory" else f"{value:g}"


def quantity(value: str) -> float:
    """A Kubernetes quantity as a number: `16Gi`, `500m`, `2`; 0 for what is none."""
    number = value.rstrip("kmMGTPKi")
    try:
        return float(number) * UNITS[value[len(number) :]]
    except (ValueError, KeyError):
        return 0.0
