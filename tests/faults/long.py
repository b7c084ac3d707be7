"""A long run: do memory, file descriptors, threads or disk grow with its steps?"""

import contextlib
import os
import signal
import time
from pathlib import Path

import numpy as np

from tests.faults.stage import Run, children, make_config

# Growth in 100 steps above which something leaks. Trajectories and metrics grow by design and are
# no part of the disk.
ALLOWED = {"rss_mb": 8.0, "fds": 1.0, "threads": 1.0, "children": 0.5, "disk_mb": 0.5}
GROWING = ("trajectories", "metrics.jsonl")


def long_run(folder, steps):
    """Play a run of so many tiny steps, print the growth of each resource in 100 steps, and return
    the exit code."""
    words = [f"--config={make_config(folder)}", f"--workdir={folder / 'run'}"]
    words += [f"steps={steps} eval.every=50 checkpoint.every=10"]
    run, seen, shown = Run(words, folder / "log", None), [], 0
    try:
        while not run.ended():
            time.sleep(0.2)
            step = steps_done(folder / "run")
            if step > (seen[-1][0] if seen else 0):
                seen.append((step, measured(run.pid, folder / "run")))
            if step >= shown + max(1, steps // 20):
                shown = step
                print(f"step {step}/{steps}: {figures(seen[-1][1])}", flush=True)
    finally:
        run.signal(signal.SIGKILL)
    if run.code:
        print(run.said[-2000:])
        return 1
    return verdict(seen)


def steps_done(workdir):
    try:
        return (workdir / "metrics.jsonl").read_bytes().count(b"\n") - 1
    except FileNotFoundError:
        return 0


def measured(pid, workdir):
    """Return what a process and its workdir take."""
    process = Path(f"/proc/{pid}")
    try:
        lines = (process / "status").read_text().splitlines()
        status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        fds = len(os.listdir(process / "fd"))
    except FileNotFoundError:
        return {}
    return {
        "rss_mb": int(status["VmRSS"].split()[0]) / 1024,
        "fds": fds,
        "threads": int(status["Threads"]),
        "children": len(children(pid)),
        "disk_mb": disk_of(workdir) / 1e6,
    }


def disk_of(folder):
    """Return the bytes of the files in a folder, without those that grow. Others may vanish
    meanwhile."""
    found = 0
    for path, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in GROWING]
        for name in files:
            with contextlib.suppress(FileNotFoundError):
                found += os.stat(os.path.join(path, name)).st_size * (name not in GROWING)
    return found


def figures(values):
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items())


def verdict(seen):
    """Print the growth of each resource in 100 steps, and return 1 if one is above what is allowed.

    The slope is the median of those between any two steps (Theil and Sen), which some odd
    measurements do not change.
    The first fifth is left out: programs are compiled there and caches are filled.
    """
    settled = [(step, values) for step, values in seen if values and step > 0.2 * seen[-1][0]]
    steps = np.array([step for step, _ in settled], float)
    first, second = np.triu_indices(len(steps), max(1, len(steps) // 4))
    leaks = []
    for name, allowed in ALLOWED.items():
        values = np.array([values[name] for _, values in settled])
        slopes = (values[second] - values[first]) / (steps[second] - steps[first])
        slope = 100 * float(np.median(slopes))
        leaks += [name] if slope > allowed else []
        growth = f"{slope:+8.3f} in 100 steps (allowed {allowed:g})"
        print(f"{name:9} {values[0]:9.4g} -> {values[-1]:9.4g}   {growth}")
    found = f"grows: {', '.join(leaks)}" if leaks else "nothing grows"
    print(f"steps {steps[0]:.0f} to {steps[-1]:.0f}: {found}")
    return bool(leaks)
