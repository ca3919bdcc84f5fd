"""What a run imports and what it does at its end: torch's compiler is left alone until something is compiled."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Each takes a second or more to import, and a run that compiles nothing needs none of them.
HEAVY = {"torch._dynamo.eval_frame", "torch._inductor", "torch.distributed.fsdp", "sklearn", "pandas"}
DRAWN = {"matplotlib"}  # by the parent, once the last step is done
NEVER = {"matplotlib.pyplot", "plotly"}  # a single run has no use for them

PUT_OFF = """
import sys
import torch
from engine.pipeline.lazy_dynamo import put_off
put_off()
"""


def python(code: str, *arguments: str, cwd: Path | None = None) -> str:
    """What a new interpreter prints that runs `code`."""
    command = [sys.executable, "-c", code, *arguments]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


WITNESS = """
import json, os, sys
from pathlib import Path
from torch.optim.lr_scheduler import LambdaLR

def constant(optimizer):
    def factor(step):  # asked again after each step
        if step == 2:
            Path(f"imported-{os.getpid()}.json").write_text(json.dumps(sorted(sys.modules)))
        return 1.0
    return LambdaLR(optimizer, factor)
"""


@pytest.mark.process
@pytest.mark.slow
def test_no_process_of_a_run_imports_what_only_compiling_needs(tmp_path: Path) -> None:
    (tmp_path / "witness.py").write_text(WITNESS)
    code = """
import json, os, sys
from engine.__main__ import run
if __name__ == "__main__":
    code = run()
    with open(f"imported-{os.getpid()}.json", "w") as file:
        json.dump(sorted(sys.modules), file)
    sys.exit(code)
"""
    arguments = [
        "model=mlp",
        "train.steps=3",
        "lr_scheduler=none",
        "lr_scheduler._target_=witness.constant",
        "hydra.run.dir=run",
    ]
    (tmp_path / "start.py").write_text(code)  # a file: the fork server looks for the main module
    python("import runpy; runpy.run_path('start.py', run_name='__main__')", *arguments, cwd=tmp_path)
    imported = [set(json.loads(path.read_text())) for path in tmp_path.glob("imported-*.json")]
    assert len(imported) == 3  # the parent and two workers
    for modules in imported:
        assert "torch.optim" in modules
        assert not modules & (HEAVY | NEVER)
    assert sum(modules >= DRAWN for modules in imported) == 1


def test_a_plan_imports_no_torch(tmp_path: Path) -> None:
    code = "import sys; from engine.__main__ import run; run(); print([n for n in sys.modules if n in ('torch',)])"
    assert python(code, "mode=plan", "hydra.run.dir=plan", cwd=tmp_path).endswith("[]\n")


@pytest.mark.slow
def test_training_needs_no_compiler_and_compiling_still_works() -> None:
    code = f"""{PUT_OFF}
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint
with FakeTensorMode():
    nn.Linear(4, 5)(torch.empty(3, 4)).sum().backward()
layer, value = nn.Linear(4, 5), torch.ones(2, 4)
optimizer = torch.optim.AdamW(layer.parameters())
checkpoint(layer, value, use_reentrant=False).sum().backward()
optimizer.step()
assert "torch._dynamo.eval_frame" not in sys.modules
import torch._dynamo
assert "torch._dynamo.eval_frame" not in sys.modules
compiled = torch.compile(layer, backend="eager", fullgraph=True)
assert torch.equal(compiled(value), layer(value))
assert sys.modules["torch._dynamo"] is torch._dynamo and "torch._dynamo.eval_frame" in sys.modules
assert torch._dynamo.config is sys.modules["torch._dynamo.config"]
checkpoint(compiled, value, use_reentrant=False).sum().backward()
optimizer.step()
print("right")
"""
    assert python(code) == "right\n"


@pytest.mark.parametrize(
    "need",
    ["import torch._dynamo.source", "from torch._dynamo import optimize", "torch._dynamo.reset()",
     "from torch._dynamo.utils import counters", "import torch._inductor.config",
     "torch.compiler.reset()"],
)  # fmt: skip
@pytest.mark.slow(most=3)
def test_whatever_else_is_asked_of_it_imports_the_compiler(need: str) -> None:
    code = f"{PUT_OFF}{need}\nimport torch._dynamo\ntorch._dynamo.optimize\nprint('right')"
    assert python(code) == "right\n"


@pytest.mark.slow
def test_what_is_disabled_before_stays_out_of_a_compilation_after() -> None:
    code = f"""{PUT_OFF}
import torch._dynamo
@torch._dynamo.disable
def seen(x):
    traced.append(torch.compiler.is_compiling())
    return x + 1
traced = []
assert seen(torch.ones(1)).item() == 2
assert torch.compile(lambda x: seen(x) * 2, backend="eager")(torch.ones(1)).item() == 4
print(traced)
"""
    assert python(code) == "[False, False]\n"


@pytest.mark.slow
def test_a_compiler_that_is_imported_already_is_left_alone() -> None:
    code = "import torch._dynamo as real\nimport sys\nfrom engine.pipeline.lazy_dynamo import put_off\nput_off()\n"
    assert python(code + "print(sys.modules['torch._dynamo'] is real)") == "True\n"


@pytest.mark.slow
def test_the_end_collects_no_garbage() -> None:
    """A collection goes through every object there is, several times at the end: seconds, after the last word."""
    code = """
import atexit, gc
import torch
from engine.__main__ import leave
atexit.register(lambda: print(gc.get_count(), len(gc.get_objects()) < 2000, gc.get_freeze_count() > 100000))
leave(0)
"""
    assert python(code).endswith("True True\n")
