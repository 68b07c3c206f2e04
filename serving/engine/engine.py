"""The engine: a model with its store, and the loop that carries requests from prompt to output."""

import dataclasses
import time
from functools import partial
from pathlib import Path

from glm53.checkpoint.source import load_checkpoint, read_config
from glm53.jax_settings import own_jax_settings
from glm53.model.kv_geometry import kv_geometry
from glm53.model.sharding import make_mesh
from glm53.tokenizer import Tokenizer
from kvcache.tiers.page_states import PageState
from serving.engine.buckets import Buckets
from serving.engine.compile_counter import CompileCounter
from serving.engine.launched import Launched, SequenceResult
from serving.engine.metrics import EngineCounters, LoopMetrics
from serving.engine.model_runner import ModelRunner
from serving.engine.open_requests import OpenRequests
from serving.engine.out_of_memory import explained_out_of_memory
from serving.engine.prefix_files import PrefixTransfer
from serving.engine.state import EngineState
from serving.engine.warm_up import keep_compiled_programs, warm_up_programs
from serving.errors import EngineDeadError, drop_tracebacks
from serving.options.engine_options import (
    EngineOptions,
    check_flag,
    model_path,
    resolve_batched_tokens,
    resolve_max_model_len,
    resolve_numerics,
    resolve_row_kind,
)
from serving.options.plain_values import plain_value
from serving.options.store_options import (
    check_store_options,
    free_host_memory,
    max_step_rows,
    page_options,
    reserve_for_store,
    resolve_geometry,
)
from serving.requests.generation_config import GenerationConfig
from serving.requests.input_processor import InputProcessor
from serving.requests.outputs import TokenTexts
from serving.requests.request import Request
from serving.requests.sequence import RequestSequence
from serving.scheduler import (
    Plan,
    PrefillChunk,
    Scheduler,
    Sequence,
    SequenceOutOfPagesError,
)


class Engine:
    """A loaded model, and the requests that it serves, a step at a time.

    A step launches what the scheduler plans, chunks of prompts and then one token of everything
    that decodes, and takes the results of the step before while the device works. Only one thread
    may be in the engine at a time.

    Args:
        options: the model, and how to run it.
        warm_up: compile everything that serving may launch, so that nothing is compiled later.

    Attributes:
        config: the model's configuration.
        tokenizer: None if the model has none.
        max_model_len: longest prompt and output together, in tokens.
        input_processor: makes requests of prompts; any thread may use it.
        runner: the device side.
        requests: those that have not ended.

    Raises:
        FileNotFoundError: the model is not there.
        CheckpointError: its weights are damaged or of another model.
        ValueError: an option is refused; the message names it.
    """

    @own_jax_settings()
    def __init__(self, options: EngineOptions, *, warm_up: bool = False) -> None:
        warm_up = plain_value(warm_up)
        check_flag("warm_up", warm_up)
        check_store_options(options)
        path, free_host_bytes = model_path(options.model), free_host_memory()
        reserve_for_store(options, free_host_bytes)
        mesh = make_mesh(options.tensor_parallel_size)
        on_cpu = mesh.devices.flat[0].platform == "cpu"
        config = read_config(path)
        self.config = resolve_numerics(
            config, options.dtype, options.latent_norm_eps, options.activation_quantization, on_cpu
        )
        self.max_model_len = resolve_max_model_len(config, options.max_model_len)
        # Whatever can be refused is, before the weights are read.
        one_page = kv_geometry(
            self.config,
            row_kind=resolve_row_kind(options.kv_cache_dtype, self.config.compute_dtype),
            device_pages=1,
            max_model_len=self.max_model_len,
            max_sequences=options.max_num_seqs,
            num_devices=mesh.size,
        )
        has_tokenizer = (path / "tokenizer.json").is_file()
        self.tokenizer = Tokenizer.from_dir(path) if has_tokenizer else None
        generation_config = GenerationConfig.from_dir(path, config.vocab_size)
        keep_compiled_programs()
        params = load_checkpoint(path, self.config, mesh, use_tqdm=True)
        geometry = resolve_geometry(one_page, options, free_host_bytes, mesh, config.index_topk)
        batched_tokens = resolve_batched_tokens(options.max_num_batched_tokens, on_cpu)
        with explained_out_of_memory(options, geometry, config.vocab_size, on_cpu=on_cpu):
            self.runner = ModelRunner(
                self.config,
                params,
                geometry,
                mesh,
                Buckets.for_geometry(geometry, max_step_rows(geometry, batched_tokens)),
                None if self.tokenizer is None else TokenTexts(self.tokenizer),
            )
            self.runner.synchronize()
        self.input_processor = InputProcessor(
            tokenizer=self.tokenizer,
            generation_config=generation_config,
            eos_token_ids=generation_config.eos_token_ids | frozenset(config.eos_token_ids),
            vocab_size=config.vocab_size,
            max_model_len=self.max_model_len,
            rows_per_page=geometry.rows_per_page,
            device_pages=geometry.device_pages,
            # With "swap" the pages of what runs are all on the devices.
            host_pages=0 if options.kv_policy == "swap" else geometry.host_pages,
            page_options=page_options(options),
            enable_prefix_caching=options.enable_prefix_caching,
        )
        self._transfer = PrefixTransfer(self.runner)
        self._counters = EngineCounters()
        self._state = EngineState(self.runner, batched_tokens, self._counters)
        self.requests: OpenRequests = self._state.requests
        if warm_up:
            warm_up_programs(self.runner)
        self._compilations = CompileCounter()

    @property
    def scheduler(self) -> Scheduler[RequestSequence]:
        """Scheduler of the steps: another one after a step that failed."""
        return self._state.scheduler

    @property
    def has_work(self) -> bool:
        """Whether a step has something to do."""
        return bool(len(self.requests) or self._state.in_flight)

    @property
    def num_waiting(self) -> int:
        """Sequences that have not started."""
        return self.scheduler.num_waiting

    def check_alive(self) -> None:
        """Refuses further requests once the engine has stopped. Any thread may call it.

        Raises:
            EngineDeadError: it has.
        """
        self._state.failures.check_alive()

    @own_jax_settings()
    def add(self, request: Request) -> None:
        """Queues a request. Once the engine has stopped, it fails with an EngineDeadError."""
        try:
            self.check_alive()
        except EngineDeadError as error:
            drop_tracebacks(error)
            self.requests.end(request, error, step_failed=True)
            self.requests.note_grown(request)
        else:
            self._state.change(partial(self._add, request))

    @own_jax_settings()
    def abort(self, request: Request) -> None:
        """Ends what of a request is not done; its pages may serve others at once."""
        self._state.change(partial(self._abort, request))

    @own_jax_settings()
    def step(self) -> list[Request]:
        """Launches a step, and takes the results of the one before.

        Errors stay with the requests: one that cannot have its pages fails alone, and any other
        error fails all that have started, whose rows are lost; the others go on. After several such
        errors in a row, without a token between them, the engine stops and all fail.

        Returns:
            The requests whose outputs have grown, ended or failed since the last step, those among
            them that were aborted.
        """
        self._state.change(self._step)
        return self.requests.take_grown()

    @own_jax_settings()
    def abort_all(self) -> None:
        """Ends everything and builds an empty store, as after an interruption."""
        self._state.abort_all()

    @own_jax_settings()
    def close(self) -> None:
        """Ends everything and frees the memory of weights and store. No other call may follow."""
        self._state.delete()

    @own_jax_settings()
    def reset_prefix_cache(self) -> bool:
        """Drops cached pages that nothing uses; whether those were all."""
        return self._state.change(self.runner.cache.drop_cached) is True

    @own_jax_settings()
    def export_prefix(self, token_ids: list[int], path: Path) -> None:
        """Writes the cached rows of a prefix to a file.

        Raises:
            ValueError: not all of these tokens are cached.
            OSError: the file cannot be written.
        """
        self._transfer.write(token_ids, path)

    @own_jax_settings()
    def import_prefix(self, path: Path) -> int:
        """Puts a file's rows into the cache; see `LLM.import_prefix`."""
        return self._state.change_or_raise(partial(self._transfer.read, path))

    def metrics(self) -> LoopMetrics:
        """Metrics of the engine now."""
        scheduled, residency = self.scheduler.counters, self.runner.cache.residency
        return LoopMetrics(
            num_waiting=self.scheduler.num_waiting,
            num_running=self.scheduler.num_running,
            num_preempted=self.scheduler.num_preempted,
            num_preemptions=scheduled.preempted,
            steps=scheduled.steps,
            device_pages=self.runner.geometry.device_pages,
            free_device_pages=residency.states.num_free_device,
            host_pages=self.runner.geometry.host_pages,
            free_host_pages=residency.states.num_free_host,
            pages={state.name.lower(): residency.states.count(state) for state in PageState},
            prompt_tokens=scheduled.prompt_tokens + scheduled.cached_tokens,
            cached_tokens=scheduled.cached_tokens,
            cache=self.runner.counters,
            compilations=self._compilations.count,
            **{
                field.name: getattr(self._counters, field.name)
                for field in dataclasses.fields(self._counters)
            },
        )

    def _add(self, request: Request) -> None:
        self.requests.add(request)
        for sequence in request.sequences:
            self.scheduler.add(sequence, request.encoded)
        request.encoded = None  # The scheduler keeps it as long as the prompt is looked up.

    def _abort(self, request: Request, error: Exception | None = None) -> None:
        self.requests.end(request, error, step_failed=False)
        self._state.close_sequences(request.sequences)

    def _step(self) -> None:
        if not self.runner.usable:
            self._state.renew_store()
        num_open, launched = len(self.requests), list[Launched]()
        while (plan := self._schedule()) is not None:
            launched.append(self.runner.run(plan))
        results, self._state.in_flight = self._state.in_flight, launched
        if not results and not launched and num_open == len(self.requests) > 0:
            raise RuntimeError(f"{num_open} sequences wait, and none of them can go on")
        ended: list[RequestSequence] = []
        try:
            for launch in results:
                ended += self._accept(self._fetch(launch))
        finally:
            # Last, so that whoever waits for a sequence finds its pages still cached; also before
            # an error, which is none of those that are complete.
            self._state.close_sequences(ended)

    def _schedule(self) -> Plan[RequestSequence] | None:
        """The next launch of the step; a request that cannot have its pages fails."""
        while True:
            try:
                plan = self.scheduler.schedule()
            except SequenceOutOfPagesError as error:
                self._fail(error.sequence, error)
                continue
            if isinstance(plan, PrefillChunk):
                self.requests.note_started(plan.sequence)
            return plan

    def _fetch(self, launch: Launched) -> list[SequenceResult]:
        self._counters.stalls += not launch.is_ready
        start = time.monotonic()
        results = self.runner.results(launch)
        self._counters.stalled_seconds += time.monotonic() - start
        return results

    def _accept(self, results: list[SequenceResult]) -> list[RequestSequence]:
        """Hands results to their sequences; returns those that have ended."""
        now, ended = time.monotonic(), []
        with self.requests.output_lock:
            for result in results:
                result.sequence.reads += result.reads
            for result in self.scheduler.process(results):
                sequence = result.sequence
                if result.prompt_logprobs is not None:
                    sequence.accept_prompt_logprobs(result.start, result.prompt_logprobs)
                if result.token is not None:
                    sequence.accept(result.token, result.logprobs)
                    self._note_token(sequence, now)
                if sequence.finished:
                    ended.append(sequence)
        return ended

    def _note_token(self, sequence: RequestSequence, now: float) -> None:
        request, counters = self.requests.owner(sequence), self._counters
        self.requests.note_grown(request)
        request.first_token = request.first_token or now
        if sequence.finished:
            request.ended = now
        self._state.failures.end()
        counters.generated_tokens += 1
        if sequence.last_token_at is not None:
            counters.later_tokens += 1
            counters.later_token_seconds += now - sequence.last_token_at
        elif request.num_output_tokens == 1:
            counters.first_tokens += 1
            counters.first_token_seconds += now - request.arrival
        sequence.last_token_at = now

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        """Fails the request of a sequence, and nothing else."""
        drop_tracebacks(error)
        self._abort(self.requests.owner(sequence), error)
