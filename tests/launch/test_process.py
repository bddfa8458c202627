"""`hirank run` around commands that never see PEFT: exit codes, signals, streams, start-up."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hirank.launch.process import child_environment
from hirank.launch.records import NOTHING
from launch.running import command, environment, plain, run

UNUSED = f"{NOTHING}, and PEFT was not imported"
LISTENER = """
import signal, sys, time
seen = []
signal.signal(signal.SIGINT, lambda *_: seen.append(1))
print("ready", flush=True)
while not seen:
    time.sleep(0.01)
time.sleep(0.3)
print(f"interrupted {len(seen)}", flush=True)
sys.exit(5)
"""


def test_streams_and_exit_code_are_the_commands_own():
    code = "import sys; print(sys.stdin.read(), end=''); print('err', file=sys.stderr); sys.exit(7)"
    words = command("--", sys.executable, "-c", code)
    done = subprocess.run(words, input="in", capture_output=True, text=True, env=environment())
    assert (done.returncode, done.stdout, done.stderr) == (7, "in", f"err\n{UNUSED}\n")


def test_every_word_after_the_dashes_is_the_commands():
    code = "import sys; print(sys.argv[1:])"
    done = run("--verbose", "--", sys.executable, "-c", code, "--verbose", "--", "--report", "x")
    assert done.stdout == "['--verbose', '--', '--report', 'x']\n"


def test_a_command_that_is_no_python(tmp_path: Path):
    report = tmp_path / "report.json"
    done = run("--report", report, "--", "sh", "-c", "echo $0 $PYTHONPATH; exit 3", PYTHONPATH="/a")
    assert done.returncode == 3
    assert re.fullmatch(r"sh \S*hirank-run-\w+:/a\n", done.stdout)
    told = json.loads(report.read_text())
    assert told["exit_code"] == 3
    assert (told["summary"], told["models"]) == ([NOTHING], [])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "hirank run got no command: write it after --"),
        (["--", "no-such-program"], "hirank run found no command 'no-such-program'"),
        (["--", __file__], "is not executable: write 'python "),
        (["--", sys.executable, "-I", "x.py"], "which python -I ignores"),
        (["--backend", "cuda", "--", "true"], "--backend got 'cuda': choose from auto, triton"),
        (["--dropout", "none", "--", "true"], "--dropout got 'none': choose from peft, single"),
        (["--report", "/no/such/x.json", "--", "true"], "there is no folder /no/such: make it."),
    ],
)
def test_what_cannot_run_is_refused_in_one_sentence(words: list[str], said: str):
    done = run(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_command_ended_by_a_signal():
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert run("--", sys.executable, "-c", code).returncode == 128 + signal.SIGKILL


def test_an_interrupt_is_handed_on_and_waited_for():
    words = command("--", sys.executable, "-c", LISTENER)
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment(),
                          start_new_session=True) as process:  # fmt: skip
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == "interrupted 1\n"
    assert process.returncode == 5


def test_termination_is_handed_on():
    code = "print('ready', flush=True); import time; time.sleep(60)"
    words = command("--", sys.executable, "-c", code)
    with subprocess.Popen(words, stdout=subprocess.PIPE, env=environment()) as process:
        process.stdout.readline()
        process.terminate()
    assert process.returncode == 128 + signal.SIGTERM


def test_ctrl_c_in_a_terminal_reaches_the_command_once():
    pid, terminal = pty.fork()
    if pid == 0:
        words = command("--", sys.executable, "-c", LISTENER)
        os.execve(words[0], words, environment())
    said = b""
    while b"ready" not in said:
        said += os.read(terminal, 1024)
    os.write(terminal, b"\x03")
    while b"interrupted" not in said:
        said += os.read(terminal, 1024)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(terminal)
    assert b"interrupted 1" in said
    assert code == 5


@pytest.fixture
def started(tmp_path: Path):
    """Run Python as a process of a run does, and return what it prints."""

    def start(*words: str, **changes: str) -> str:
        folder = tmp_path / "hook"
        if not folder.exists():
            source = Path(__file__).parents[2] / "src" / "hirank"
            folder.mkdir()
            (folder / "sitecustomize.py").write_text((source / "launch/startup.py").read_text())
            (folder / "package").write_text(str(source))
        variables = child_environment(environment(**changes), folder)
        words = (sys.executable, *words)
        done = subprocess.run(words, capture_output=True, text=True, env=variables)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    return start


def test_a_process_without_peft_pays_next_to_nothing(started):
    assert started("-c", "import sys; print({'torch', 'peft', 'hirank'} & set(sys.modules))") == (
        "set()\n"
    )
    times = []
    for _ in range(5):
        lines = started("-X", "importtime", "-c", "pass").splitlines()
        times += [int(line.split("|")[1]) for line in lines if line.endswith(" sitecustomize")]
    assert 0 < min(times) < 20_000, "microseconds"


def test_the_sitecustomize_that_was_there_runs_too(started, tmp_path: Path):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "sitecustomize.py").write_text("import sys; sys.theirs = __file__")
    code = "import sys, sitecustomize; print(sys.theirs, sitecustomize.__file__)"
    file = str(theirs / "sitecustomize.py")
    assert started("-c", code, PYTHONPATH=str(theirs)).split() == [file, file]


def test_our_folder_is_gone_from_the_path_but_reaches_spawned_processes(started, tmp_path: Path):
    script = tmp_path / "spawn.py"
    script.write_text(
        "import multiprocessing, sys\n"
        "def waits(_):\n"
        "    finders = [type(finder).__name__ for finder in sys.meta_path]\n"
        "    return finders.count('Finder'), any(p.endswith('/hook') for p in sys.path)\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(waits(0), *pool.map(waits, [0]))\n"
    )
    assert started(str(script)) == "(1, False) (1, False)\n"


def test_hirank_is_found_without_its_neighbours(started):
    """It comes from the folder it was started from, and that folder joins no path."""
    paths = "import sys; print(sys.path)"
    found = Path(__file__).parents[2] / "src" / "hirank" / "__init__.py"
    alone = plain([sys.executable, "-c", paths]).stdout
    assert started("-c", f"import hirank; print(hirank.__file__); {paths}") == f"{found}\n{alone}"


@pytest.mark.parametrize(
    ("torch", "peft", "said"),
    [
        ("2.12.0", "0.9.0", "with peft 0.9.0, and hirank needs peft>=0.18: upgrade it there."),
        ("2.1.2", "0.21.0", "with torch 2.1.2, and hirank needs torch>=2.11: upgrade it there."),
    ],
)
def test_old_libraries_end_the_process_in_one_sentence(tmp_path: Path, torch, peft, said):
    """Not seen before the start: `sh` may run anything."""
    for name, version in (("torch", torch), ("peft", peft)):
        (tmp_path / f"{name}.py").write_text(f"__version__ = {version!r}\nclass nn: Module = 0\n")
    script = f"{sys.executable} -c 'import peft; print(1)'"
    done = run("--", "sh", "-c", script, PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr.splitlines()[0]


def test_nothing_is_left_behind(tmp_path: Path):
    run("--", "true", TMPDIR=str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_the_environment_is_kept_and_no_empty_entry_made(tmp_path: Path):
    assert child_environment({"A": "1"}, tmp_path) == {"A": "1", "PYTHONPATH": str(tmp_path)}
    assert child_environment({"PYTHONPATH": ""}, tmp_path)["PYTHONPATH"] == str(tmp_path)
    assert child_environment({"PYTHONPATH": "/x"}, tmp_path)["PYTHONPATH"] == f"{tmp_path}:/x"


def test_without_hirank_nothing_differs():
    code = "import sys; print([type(f).__name__ for f in sys.meta_path].count('Finder'))"
    assert plain([sys.executable, "-c", code]).stdout == "0\n"
