"""The manifest and the script of docs/schedulers.md: make packages."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from harness import provenance
from harness.command.compose import compose
from tests.conftest import LIBRARY, ROOT

PAGE = LIBRARY / "docs" / "schedulers.md"


def blocks(language: str) -> list[str]:
    """Return the page's blocks of code in a language."""
    found = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found
    return found


MANIFESTS = [*map(yaml.safe_load, blocks("yaml"))]
WHOLE = [manifest for manifest in MANIFESTS if "kind" in manifest]


@pytest.mark.packages
@pytest.mark.filterwarnings("default")
def test_manifests_fit_the_schema_of_kubernetes() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    version = kubernetes_validate.latest_version()
    for manifest in WHOLE:
        kubernetes_validate.validate(manifest, version, strict=True)
        manifest["spec"]["completons"] = 1
        with pytest.raises(kubernetes_validate.ValidationError, match="completons"):
            kubernetes_validate.validate(manifest, version, strict=True)


def test_commands_of_the_manifests_compose() -> None:
    """Bash expands them as in the pod with index 1."""
    (container,) = WHOLE[0]["spec"]["template"]["spec"]["containers"]
    scripts = [container["args"], *(m["args"] for m in MANIFESTS if "args" in m)]
    found = []
    for (script,) in scripts:
        show = script.replace("exec python", "printf '%s\\n'")
        words = subprocess.check_output(
            ["bash", "-c", show], env=os.environ | {"JOB_COMPLETION_INDEX": "1"}, text=True
        ).splitlines()
        assert words[0] == "train.py"
        one = [re.sub(r"=tag\(.*", "=0.01", word) for word in words[1:] if word != "-m"]
        cfg = compose("train", one)
        found.append((cfg.name, cfg.resume, cfg.model.optimizer.lr, cfg.seed))
    assert found == [
        ("rates/1", "auto", 0.003, 1),
        ("rates/1", "auto", 0.001, 2),
        ("default", "auto", 0.01, 1),
    ]


def process_of(word: str) -> int | None:
    """Return the pid of the train.py with an argument."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"train.py" in arguments and word.encode() in arguments:
            return int(path.parent.name)
    return None


@pytest.mark.packages
def test_ray_starts_a_killed_run_again(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    (tmp_path / "ray_sweep.py").write_text(blocks("python")[0])
    words = ["data=synthetic", "model=mlp", "strategy=cpu", "trainer.max_epochs=2", "watch=none"]
    words += ["+callbacks.trace._target_=tests.faults.trace.Trace", "checkpoint.every_n_steps=5"]
    words += [f"+callbacks.trace.folder={tmp_path}/trace", f"output_dir={tmp_path}/outputs"]
    words += ["+callbacks.trace.seconds_per_batch=0.2"]
    script = subprocess.Popen([sys.executable, tmp_path / "ray_sweep.py", *words], cwd=ROOT)
    end = time.monotonic() + 300
    saved = "outputs/rates/1/*/checkpoints/step_*.ckpt"
    while not [*tmp_path.glob(saved)] and script.poll() is None:
        assert time.monotonic() < end
        time.sleep(0.05)
    pid = process_of(f"output_dir={tmp_path}/outputs") and process_of("name=rates/1")
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert script.wait(500) == 0
    runs = sorted(path.parent for path in tmp_path.glob("outputs/rates/*/*/results.json"))
    assert [run.parent.name for run in runs] == ["0", "1", "2", "3"]
    assert [len(provenance.read(run)["starts"]) for run in runs] == [1, 2, 1, 1]
