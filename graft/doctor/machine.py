"""Checks of a machine: Python, packages, device, sandbox, extras, free disk space."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec

from graft.doctor.deadline import checked
from graft.registry import UnknownName, load_service
from graft.train.monitor.check import FAIL, PASS, WARN, Check

EXTRAS = {
    "envs": ("reasoning_gym",),
    "search": ("bm25s",),
    "dense": ("sentence_transformers", "faiss"),
    "serve": ("starlette", "uvicorn", "msgpack"),
    "mcp": ("mcp",),
    "hub": ("datasets",),
}
"""Extra -> the modules that it brings."""


DEADLINE = 120.0
"""Seconds per check; the first import of torch is slow on a network disk."""


def examine() -> Iterator[Check]:
    probes = {
        "python": python,
        "packages": torch,
        "device": device,
        "sandbox": sandbox,
        "agents": agents,
        "extras": extras,
        "disk": disk,
    }
    for name, probe in probes.items():
        yield from checked(name, probe, DEADLINE)


def python() -> Check:
    seen = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return Check("python", PASS, seen)


def torch() -> Check:
    seen = []
    for name, least in (("torch", (2, 11)), ("transformers", (5, 16))):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            return Check("packages", FAIL, f"{name} is not installed", "pip install graft-rl")
        seen.append(f"{name} {version}")
        if tuple(int(part) for part in version.split("+")[0].split(".")[:2]) < least:
            wanted = ".".join(map(str, least))
            return Check("packages", FAIL, seen[-1], f"pip install '{name}>={wanted}'")
    return Check("packages", PASS, ", ".join(seen))


def device() -> Check:
    from torch import cuda

    from graft.models.device import why_no_kernels
    from graft.models.device_choice import choose_device

    if not cuda.is_available():
        return Check("device", PASS, "CPU (no CUDA device is visible); models run in float32")
    name, size = cuda.get_device_name(0), cuda.get_device_properties(0).total_memory
    seen = f"{cuda.device_count()} x {name}, {size / 2**30:.0f} GiB"
    if reason := why_no_kernels(choose_device("cuda")):
        remedy = "runs work all the same: plain PyTorch replaces the kernels, slowly"
        return Check("device", WARN, f"{seen}; {reason}", remedy)
    return Check("device", PASS, seen)


def sandbox() -> Check:
    try:
        chosen, tried = load_service("sandbox")()
    except UnknownName as error:
        return Check("sandbox", WARN, str(error))
    others = "; ".join(f"{name}: {'works' if works else why}" for name, works, why in tried)
    if chosen:
        return Check("sandbox", PASS, f"{chosen} ({others})")
    remedy = "install bubblewrap, or allow user namespaces; code tasks are refused until then"
    return Check("sandbox", WARN, f"no method works ({others})", remedy)


def agents() -> Check:
    from graft.gateway.supervision import choose, methods

    others = "".join(f"; no {method}: {reason}" for method, reason in methods().items() if reason)
    return Check("agents", PASS, f"the processes of programs are held by a {choose()}{others}")


def extras() -> Check:
    absent = [extra for extra, modules in EXTRAS.items() if not all(find_spec(m) for m in modules)]
    if not absent:
        return Check("extras", PASS, ", ".join(EXTRAS))
    remedy = f'if you want them: pip install "graft-rl[{",".join(absent)}]"'
    return Check("extras", WARN, f"not installed: {', '.join(absent)}", remedy)


def disk() -> Check:
    free = shutil.disk_usage(".").free / 2**30
    if free < 2:
        return Check("disk", WARN, f"{free:.1f} GiB free here", "checkpoints may not fit")
    return Check("disk", PASS, f"{free:.0f} GiB free here")
