"""A process that is forked from one with engines."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.toy_engine import toy_options

FORK = """
import dataclasses, gc, os, signal, sys, threading, warnings
from pathlib import Path
from glm53 import LLM, SamplingParams, ServingLoop
from tests.helpers.toy_engine import tokens, toy_options

options = toy_options(Path(sys.argv[1]))
prompt = {"prompt_token_ids": tokens(1, 40)}
params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
llm = LLM(**dataclasses.asdict(options))
loop = ServingLoop(options, warm_up=False)
loop.start()
iterator = llm.generate_iter(prompt, params, stream=True)
next(iterator)
stream = loop.submit(prompt, params)
outputs = iter(stream)
next(outputs)
locks = [stream._changed, loop._inbox, loop._engine.requests.output_lock, llm._shared._access._lock]
held, forked = threading.Event(), threading.Event()

def hold():
    for lock in locks:
        lock.acquire()
    held.set()
    forked.wait()
    for lock in reversed(locks):
        lock.release()

holder = threading.Thread(target=hold)
holder.start()
held.wait()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    child = os.fork()
if child == 0:
    signal.alarm(60)
    calls = {
        "generate": lambda: llm.generate(prompt, params),
        "generate_iter": lambda: llm.generate_iter(prompt, params),
        "next": lambda: next(iterator),
        "serve": lambda: llm.serve([]),
        "reset": llm.reset_prefix_cache,
        "LLM": lambda: LLM(**dataclasses.asdict(options)),
        "ServingLoop": lambda: ServingLoop(options),
        "submit": lambda: loop.submit(prompt, params),
        "abort": lambda: loop.abort(stream.request_id),
        "step": loop.step,
        "start": loop.start,
        "reset of the loop": loop.reset_prefix_cache,
        "result": lambda: stream.result(),
        "output": lambda: stream.output(),
        "stream.abort": lambda: stream.abort(),
        "next of the stream": lambda: next(outputs),
        "new iteration": lambda: next(iter(stream)),
    }
    for name, call in calls.items():
        try:
            call()
        except RuntimeError as error:
            assert "spawn" in str(error), error
        else:
            raise AssertionError(name)
    iterator.close()
    outputs.close()
    llm.close()
    loop.close()
    del iterator, outputs, stream, llm
    gc.collect()
    print("refused", flush=True)
    os._exit(7)  # as multiprocessing ends a child: jax does not survive the end of the interpreter
forked.set()
holder.join()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert len(stream.result(timeout=60).outputs[0].token_ids) == 200
*_, (_, output) = iterator
assert len(output.outputs[0].token_ids) == 200
loop.close()
llm.close()
print("served")
"""


@pytest.mark.compiles
def test_fork(tmp_path: Path) -> None:
    """A child that waits for threads and locks of its parent, or disturbs it; also at its end."""
    toy_options(tmp_path)  # writes the model
    done = subprocess.run(
        [sys.executable, "-c", FORK, str(tmp_path)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["refused", "served"]
    assert "Traceback" not in done.stderr
