"""Entry point of the command line: Hydra composes, each job runs, the exit code says how it ended.

    main ──> Hydra ──> for each job: _job ──> config.load ──> run.train or run.plan
                                       └─ returns what `objective=` names; a failed job does not end a sweep

Exit codes: 0 all well; 1 a run failed, or of a sweep some job did not end well; 2 the configuration is wrong, nothing
was started; 128 + n ended by signal n.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from engine import environment
from engine.cli import run
from engine.cli.arguments import UsageError, asked_for_version, flags_first
from engine.cli.attempts import CONFIG_NAME, going_on
from engine.cli.composition import register_resolvers, run_dir, targets
from engine.cli.config import CONF, load
from engine.cli.hydra_errors import check_groups, explain
from engine.console import forgiving
from engine.errors import Interrupted
from engine.files import UnwritableError
from engine.launch import interrupt
from engine.launch.failure_report import Outcome
from engine.objectives import OBJECTIVES, value
from engine.settings import KEYS, Settings

if TYPE_CHECKING:
    from engine.folder.rows import Row

_outcomes: list[Outcome] = []  # of the jobs of this call of main, in order


def main() -> int:
    """Run what sys.argv asks for; return the exit code."""
    logging.getLogger().setLevel(logging.INFO)
    with forgiving():
        if asked_for_version(sys.argv[1:]):
            own, hydra, torch = (version(name) for name in ("hydra-pipeline-engine", "hydra-core", "torch"))
            print(f"pipeline-engine {own} (hydra-core {hydra}, torch {torch})")
            return 0
        try:
            environment.keep_sockets_short()
        except (ValueError, OSError) as error:  # OSError: no folder for temporary files at all
            return report(Outcome("failed", str(error), run.REFUSED))
        if environment.joined():
            return _join()
        try:
            environment.check_launcher()
        except ValueError as error:
            return report(run.outcome_of(run.SettingsError(str(error))))
        return _compose()


def _join() -> int:
    """Run as one of the ranks that a launcher started; rank 0 alone runs the command line."""
    # torch.distributed.launch adds this argument; the environment says the same.
    sys.argv[1:] = [a for a in sys.argv[1:] if not a.startswith(("--local-rank", "--local_rank"))]
    try:
        environment.check_launcher()
        from engine.launch.joined import meeting

        with interrupt.raising():
            here = meeting(_limit_s())
    except (KeyboardInterrupt, ValueError) as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        return report(run.outcome_of(error) if interrupted else run.outcome_of(run.SettingsError(str(error))))
    if here.rank != 0:
        return here.follow(lambda: targets(sys.argv[1:]))
    _next_attempt()
    code = _compose()
    here.close(code, _outcomes[-1].error if _outcomes else None)
    return code


def _limit_s() -> float:
    """Return how long ranks wait for each other before anything is composed: `timeout_s` as on the command line."""
    for word in reversed(sys.argv):
        key, _, value = word.partition("=")
        if key.lstrip("+") == "timeout_s":
            with suppress(ValueError):
                return min(max(1.0, float(value)), KEYS["timeout_s"].at_most or math.inf)  # NaN: 1
    return Settings.timeout_s


def _next_attempt() -> None:
    """Give an attempt after the launcher's first a folder of its own: the first one's is kept."""
    if environment.attempt() == 0:
        return
    try:
        folder = f"{run_dir(sys.argv[1:])}-attempt{environment.attempt()}"
    except (HydraException, OmegaConfBaseException, OSError, ValueError):
        return  # it is composed once more, where errors are explained
    quoted = folder.replace("\\", "\\\\").replace("'", "\\'")
    sys.argv.append(f"hydra.run.dir='{quoted}'")
    shown = folder if "${" not in folder else f"one that ends in -attempt{environment.attempt()}"
    print(f"attempt {environment.attempt()} of the launcher: this run's folder is {shown}", flush=True)


def _compose() -> int:
    """Let Hydra compose and run the job or the sweep; return the exit code."""
    register_resolvers()
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra hands its errors on instead of printing them and exiting
    _outcomes.clear()
    with interrupt.ignored():  # once a job or the sweep was interrupted, that is told
        try:
            with interrupt.raising():
                _check_start()
                sys.argv[1:] = going_on(flags_first(sys.argv[1:]))
                check_groups(sys.argv[1:])
                hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(_job)()
        except KeyboardInterrupt as error:
            _outcomes.append(run.outcome_of(error))
            return report(_outcomes[-1])
        except SweepStopped as stopped:
            _outcomes.append(Outcome("failed", str(stopped), 1))
            report(_outcomes[-1])
        except (HydraException, OmegaConfBaseException, OSError, ValueError) as error:
            complaint = explain(error)
            if complaint is None:
                raise
            _outcomes.append(Outcome("failed", complaint, run.REFUSED))
            report(_outcomes[-1])
    return _exit_code()


def _exit_code() -> int:
    """Return the exit code of all jobs together; REFUSED only where no job was started."""
    codes = {outcome.exit_code for outcome in _outcomes}
    return max(codes, default=0) if len(codes) < 2 else 1


def _check_start() -> None:
    try:
        Path.cwd()
    except FileNotFoundError as error:
        raise UsageError("the folder that this was started from has been deleted: change to one that exists") from error


def report(outcome: Outcome) -> int:
    """Print why a run did not complete, as the last thing on the screen; return its exit code."""
    sys.stdout.flush()
    if outcome.traceback:
        print(outcome.traceback.rstrip(), file=sys.stderr)
    if outcome.error:
        print(f"error: {outcome.error}" if outcome.status == "failed" else outcome.error, file=sys.stderr, flush=True)
    return outcome.exit_code


class SweepStopped(BaseException):
    """A job has failed, and the sweep is to have no other. Hydra keeps an Exception of a job to itself."""


def _job(config: DictConfig) -> float:
    """Run one job of Hydra's; return what `objective=` names, for a sweeper.

    Raises only what is meant for the whole sweep: an interruption, and the failure that is to stop it.
    """
    runtime = HydraConfig.get().runtime
    resume, folder = config.get("resume"), Path(runtime.output_dir)
    outcome = run.refuse_used(folder, Path(runtime.cwd), resume) or _outcome(config, runtime.cwd, runtime.output_dir)
    if outcome.status == "interrupted":
        _compared()
        raise Interrupted(outcome.exit_code - 128, outcome.error)
    report(outcome)
    _outcomes.append(outcome)
    if outcome.status == "failed" and config.get("stop_sweep_on_failure") is True and _in_a_sweep():
        _compared()
        job = HydraConfig.get().job.num
        raise SweepStopped(f"job {job} failed, and stop_sweep_on_failure=true: no further job runs")
    return _objective(config, Path(runtime.output_dir), outcome)


def _in_a_sweep() -> bool:
    return bool(HydraConfig.get().mode is RunMode.MULTIRUN)


def _objective(config: DictConfig, folder: Path, outcome: Outcome) -> float:
    """Return the figure of the job that ended with `outcome`, from the files in its folder."""
    planned = config.get("mode") == "plan"
    name = config.get("objective")
    content: dict[str, Any] = {}
    if outcome.status == "completed":
        with suppress(OSError, ValueError):
            content = json.loads((folder / ("plan.json" if planned else "summary.json")).read_text())
    return value(name if name in OBJECTIVES else None, content, planned)


def _outcome(config: DictConfig, start_dir: str, run_dir: str) -> Outcome:
    try:
        if environment.joined() and _in_a_sweep():
            raise ValueError("a sweep starts its own ranks: run it without torchrun")
        settings = load(config, HydraConfig.get().overrides.task)
    except ValueError as error:
        return run.finish(Path(run_dir), run.outcome_of(run.SettingsError(str(error))), None)
    return run.plan(settings, run_dir) if settings.mode == "plan" else run.train(settings, start_dir, run_dir)


def _compared() -> None:
    """Rewrite the comparison of a sweep, as far as its folder can be written."""
    if _in_a_sweep():
        from engine.report.compare import write_comparison

        with suppress(UnwritableError, OSError):
            write_comparison(HydraConfig.get().sweep.dir)


class SweepTable(Callback):
    """Hydra callback that keeps the comparison of a sweep's jobs up to date.

    It writes after each job, since Hydra does not call the end of a sweep after a failed job.
    """

    def on_job_start(self, config: DictConfig, **_: Any) -> None:
        """Print the number and overrides of a sweep's job."""
        if config.hydra.mode.name == "MULTIRUN":
            print(f"\njob {config.hydra.job.num}: {' '.join(config.hydra.overrides.task)}", flush=True)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: Any) -> None:
        """Rewrite the comparison."""
        _compared()

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """Print the comparison, and take exit codes from the folders of jobs that a launcher ran elsewhere."""
        from engine.folder.rows import read_rows
        from engine.report.compare import PAGE, comparison, write_comparison

        folder = Path(config.hydra.sweep.dir).absolute()
        try:
            rows = read_rows(folder)
            print(f"\n{comparison(rows)}", flush=True)
            write_comparison(folder, rows)
        except (UnwritableError, OSError) as error:
            _outcomes.append(Outcome("failed", f"the sweep's comparison is lost: {error}", 1))
            report(_outcomes[-1])
            return
        print(f"\n{folder / PAGE}", flush=True)
        if not _outcomes:  # a launcher ran the jobs elsewhere: their folders are the only sign
            _outcomes.extend(Outcome(row["status"], None, _code(row, folder)) for row in rows)


def _code(row: Row, folder: Path) -> int:
    """Return the exit code of a job that another process ran."""
    refused = row["status"] == "failed" and not (folder / row["job"] / CONFIG_NAME).exists()
    return 0 if row["status"] == "completed" else run.REFUSED if refused else 1
