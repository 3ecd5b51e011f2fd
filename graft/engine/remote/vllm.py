"""`VLLMEngine`: vLLM in this process, with weights of its own that `load` replaces in memory.

One thread owns vLLM and steps it for everybody; it sleeps while nobody samples. Whoever wants
something hands it a piece of work, which is done between two steps:

    await context.sample(...)   ->  work: add a request     step step step  ->  its future is set
    engine.load(weights, 3)     ->  work: end what runs with "pause", copy, forget the prefix cache

so no sample ever straddles two versions. Stop strings are looked for here, on the tokens as they
come: vLLM has no tokenizer at all. Log-probs are those of the distribution that was drawn from
(temperature, top-k, top-p applied); entropies are lower bounds from the likeliest tokens.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from graft.actions.space import ActionSpace
from graft.engine.errors import EngineError
from graft.engine.remote.stateless import (
    PendingSample,
    StatelessContext,
    check_score,
    check_space,
    model_config,
    seed_of,
    window_of,
)
from graft.engine.remote.top_entropy import TOP_K, entropy_of, known_tokens
from graft.engine.remote.weight_files import check_names, names_in
from graft.engine.stop_strings import TokenPieces
from graft.protocols import Tokenizer
from graft.types import Completion, Finish, Sampling

COLDEST = 0.01
"""vLLM warms any lower temperature than this up to it, 0 excepted."""
OURS = (
    "model",
    "dtype",
    "seed",
    "max_model_len",
    "logprobs_mode",
    "skip_tokenizer_init",
    "generation_config",
)
"""Arguments of vLLM that engine.args may not change: what is said above hangs on them."""
FOR_ONE = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
CPU_CACHE = 2**30
"""Bytes of keys and values on a CPU, where vLLM would take most of the memory that others need too."""
START = 1800.0
"""Seconds to start: a large model is read from the disk, compiled and measured."""


class VLLMEngine:
    """Continuous batching by vLLM.

    model_folder  the Hugging Face folder that the run starts from; without weights in it the first
                  `load` brings them
    tokenizer     only to look for stop strings
    eos_ids       stop tokens of every sample
    seed          of every draw, together with the context's key and its length
    space         must be the whole vocabulary: vLLM knows no modes and no extra actions
    deadline      seconds for a completion, a score or new weights
    max_context   tokens of the longest context
    args          arguments of vLLM itself, such as {"gpu_memory_utilization": 0.5}
    dtype         "float32" or "bfloat16"
    """

    def __init__(
        self,
        model_folder: str | os.PathLike[str],
        *,
        tokenizer: Tokenizer,
        eos_ids: Sequence[int] = (),
        seed: int = 0,
        space: ActionSpace | None = None,
        deadline: float = 600.0,
        max_context: int = 4096,
        args: Mapping[str, Any] | None = None,
        dtype: str = "float32",
    ) -> None:
        check_space(space, "vllm")
        self.folder = Path(model_folder)
        config = model_config(self.folder, "vllm")
        self.vocab_size: int = config["vocab_size"]
        self.window = int(min(max_context, window_of(config)))
        self.version, self.eos_ids, self.seed = 0, frozenset(eos_ids), seed
        self.deadline = deadline
        self._pieces = TokenPieces(tokenizer)
        self._expected = names_in(self.folder)
        has_weights = any(self.folder.glob("*.safetensors")) or any(self.folder.glob("*.bin"))
        wanted = _arguments(args or {}, self.folder, has_weights)
        top_k = min(wanted["max_logprobs"], self.vocab_size)
        top_k = self.vocab_size if top_k < 0 else top_k
        if top_k < 1:
            raise EngineError("engine.args max_logprobs=0 leaves no log-probs to train with")
        self._top_k, self.entropy_top_k = top_k, known_tokens(self.vocab_size, top_k)
        wanted |= {"dtype": dtype, "seed": seed % 2**32, "max_model_len": self.window}
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._running: dict[str, _Sample | _Score] = {}
        self._opened = self._asked = 0
        self._fault = "" if has_weights else "has no weights yet: load() brings them"
        self._is_open = True
        self._thread = threading.Thread(target=self._run, name="graft-vllm", daemon=True)
        self._thread.start()
        try:
            self._llm: Any = self._wait(self._do(lambda: _start(wanted)), "to start", START)
        except BaseException:
            self._work.put(None)
            raise

    @property
    def where(self) -> str:
        return "engine 'vllm'"

    def open(self, tokens: Sequence[int], key: int | None = None) -> StatelessContext:
        if not self._is_open:
            raise EngineError("the engine is closed")
        self._opened += 1
        return StatelessContext(self, tokens, seed_of(0, self._opened) if key is None else key)

    async def say(self, context: StatelessContext, sampling: Sampling) -> Completion:
        """Draw until a stop, `max_tokens` or the window; given up, it leaves nothing running."""
        if not self._is_open:
            raise EngineError("the engine is closed")
        if 0 < sampling.temperature < COLDEST:
            raise EngineError(
                f"temperature={sampling.temperature}: vLLM draws at {COLDEST} or more; 0 is greedy"
            )
        room = min(sampling.max_tokens, self.window - len(context.tokens))
        if room < 1:
            return self._saying(context, sampling, room).end(Finish.LENGTH)
        sample = _Sample(
            self._saying(context, sampling, room),
            asyncio.get_running_loop(),
            self._top_k,
        )
        name = self._name()
        seed = seed_of(self.seed, context.key, len(context.tokens))
        asked = self._parameters(sampling, sample.saying, seed)
        context.stop = lambda finish: self._work.put(lambda: self._end(name, finish))
        self._work.put(lambda: self._add(name, sample, list(context.tokens), asked))
        try:
            async with asyncio.timeout(self.deadline):
                return await sample.future
        except TimeoutError:
            raise EngineError(
                f"engine 'vllm' did not complete a sample in {self.deadline:g} s "
                f"({len(sample.saying.tokens)} tokens came; {len(self._running)} samples run). Raise "
                "rollout.deadline, or ask for fewer tokens"
            ) from None
        finally:
            if not sample.is_over:
                self._work.put(lambda: self._end(name, Finish.ABORT))

    def score(
        self,
        texts: Sequence[Sequence[int]],
        at: Sequence[Sequence[int]],
        continuations: Sequence[Sequence[int]],
        mode: int = 0,
        temperature: float = 1.0,
    ) -> list[list[list[list[float]]]]:
        """Log-probs [i][j][k] of action k of continuations[j] after text[: at[i]], for each text.

        At temperature 1 those of prompts; else every token is asked for one by one.
        """
        asked = check_score(texts, at, continuations, mode, self.vocab_size)
        flat = [
            self._wanted([*text[:place], *actions], len(actions), temperature)
            for text, places in zip(texts, at, strict=True)
            for place in places
            for actions in asked
        ]
        found = iter([[token for part in parts for token in part.result()] for parts in flat])
        return [[[next(found) for _ in asked] for _ in places] for places in at]

    def load(self, weights: Mapping[str, Any] | None, version: int) -> None:
        """Take over new weights by Hugging Face name. What is running ends with "pause"."""
        if weights is None:
            raise EngineError(
                "engine 'vllm' has weights of its own and does not see those that were changed in "
                "place; give them to load(), or use engine.name=native"
            )
        self._wait(self._do(lambda: self._reload(weights, version)), "to load weights")

    def pause(self) -> None:
        self._wait(self._do(lambda: self._end_all(Finish.PAUSE)), "to pause")

    def health(self) -> None:
        """EngineError if the thread or vLLM itself is no more."""
        self._wait(self._do(lambda: None), "to answer")

    def close(self) -> None:
        """End every sample with an error and give vLLM's memory back."""
        if not self._is_open:
            return
        self._is_open = False
        self._work.put(lambda: self._fail(EngineError("the engine was closed while it sampled")))
        self._work.put(lambda: _stop(self._llm))
        self._work.put(None)
        self._thread.join(self.deadline)

    # Below, on the thread that owns vLLM; `_do` and `_wait` are how others reach it.

    def _do(self, work: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()

        def do() -> None:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        if not self._thread.is_alive():
            future.set_exception(EngineError("engine 'vllm' is closed"))
        else:
            self._work.put(do)
        return future

    def _wait(self, future: Future[Any], what: str, deadline: float = 0.0) -> Any:
        deadline = deadline or self.deadline
        try:
            return future.result(deadline)
        except TimeoutError:
            raise EngineError(f"engine 'vllm' took more than {deadline:g} s {what}") from None

    def _run(self) -> None:
        while True:
            while not self._running or not self._work.empty():
                work = self._work.get()
                if work is None:
                    return
                work()
            try:
                outputs = self._llm.step()
            except Exception as error:  # vLLM is not to be trusted after one
                self._fault = f"broke down: {type(error).__name__}: {error}"
                self._fail(EngineError(f"engine 'vllm' {self._fault}"))
                continue
            for output in outputs:
                self._take(output)

    def _add(self, name: str, asker: _Sample | _Score, tokens: list[int], asked: Any) -> None:
        if self._fault:
            return asker.fail(EngineError(f"engine 'vllm' {self._fault}"))
        try:
            self._llm.add_request(name, {"prompt_token_ids": tokens}, asked)
        except Exception as error:  # vLLM's words for what it does not take
            return asker.fail(EngineError(f"engine 'vllm' refused a sample: {error}"))
        asker.start(self.version)
        self._running[name] = asker

    def _take(self, output: Any) -> None:
        asker = self._running.get(output.request_id)
        if asker is not None and asker.take(output):
            del self._running[output.request_id]
            if not output.finished:
                self._llm.abort_request([output.request_id])

    def _end(self, name: str, finish: Finish) -> None:
        """Nothing where it is over already."""
        asker = self._running.pop(name, None)
        if asker is not None:
            self._llm.abort_request([name])
            asker.end(finish)

    def _end_all(self, finish: Finish) -> None:
        for name in list(self._running):
            self._end(name, finish)

    def _fail(self, error: EngineError) -> None:
        for asker in self._running.values():
            asker.fail(error)
        self._running.clear()

    def _reload(self, weights: Mapping[str, Any], version: int) -> None:
        self._end_all(Finish.PAUSE)
        given: list[str] = []

        def each() -> Iterator[tuple[str, Any]]:
            for name, tensor in weights.items():
                given.append(name)
                yield name, tensor.detach()

        self._fault = "has weights that were only half replaced; give it all of them with load()"
        try:
            is_cpu = import_module("vllm.platforms").current_platform.is_cpu()
            if is_cpu:
                self._llm.apply_model(_forget_experts)
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": each()})
            if is_cpu:
                self._llm.apply_model(_repack)
            check_names(given, self._expected, self.folder)
            if not self._llm.reset_prefix_cache():
                raise EngineError("engine 'vllm' does not let go of its prefix cache")
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(f"engine 'vllm' could not take the weights: {error}") from error
        self._fault, self.version = "", version

    def _saying(self, context: StatelessContext, sampling: Sampling, room: int) -> PendingSample:
        return PendingSample(
            context.tokens,
            sampling,
            eos_ids=self.eos_ids,
            pieces=self._pieces,
            room=room,
            version=self.version,
        )

    def _parameters(self, sampling: Sampling, saying: PendingSample, seed: int) -> Any:
        vllm = import_module("vllm")
        return vllm.SamplingParams(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            max_tokens=saying.room,
            min_tokens=min(sampling.min_tokens, saying.room),
            stop_token_ids=sorted(saying.stop_tokens),
            ignore_eos=True,  # ours are among the stop tokens; others are none
            logprobs=self._top_k,
            seed=seed,
            detokenize=False,
            output_kind=vllm.sampling_params.RequestOutputKind.DELTA,
        )

    def _wanted(self, tokens: list[int], count: int, temperature: float) -> list[_Score]:
        """Scores of the last `count` tokens, on their way."""
        parameters: Any = import_module("vllm").SamplingParams
        plain = {"max_tokens": 1, "detokenize": False, "ignore_eos": True}
        if temperature == 1.0:
            asks = [(tokens, parameters(prompt_logprobs=0, **plain))]
            scores = [_Score(tokens[-count:], self.deadline)]
        else:
            if temperature < COLDEST:
                raise ValueError(f"cannot score at temperature {temperature}")
            ends = range(len(tokens) - count, len(tokens))
            asks = [
                (
                    tokens[:end],
                    parameters(temperature=temperature, logprob_token_ids=[tokens[end]], **plain),
                )
                for end in ends
            ]
            scores = [_Score([tokens[end]], self.deadline, is_drawn=True) for end in ends]
        for (prompt, asked), score in zip(asks, scores, strict=True):
            name = self._name()
            self._work.put(
                lambda name=name, score=score, prompt=prompt, asked=asked: self._add(
                    name, score, prompt, asked
                )
            )
        return scores

    def _name(self) -> str:
        self._asked += 1
        return f"graft-{self._asked}"


class _Sample:
    """A sample that vLLM works on, and the loop that waits for it."""

    def __init__(self, saying: PendingSample, loop: asyncio.AbstractEventLoop, top_k: int) -> None:
        self.saying, self.loop, self.top_k = saying, loop, top_k
        self.future: asyncio.Future[Completion] = loop.create_future()
        self.is_over = False

    def start(self, version: int) -> None:
        self.saying.version = version  # it may have waited for a load

    def take(self, output: Any) -> bool:
        """Add what was drawn; True once it is over."""
        [said] = output.outputs
        for token, known in zip(said.token_ids, said.logprobs, strict=True):
            top = [logprob.logprob for logprob in known.values() if logprob.rank <= self.top_k]
            logp: float = known[token].logprob
            finish = self.saying.add(token, logp, entropy_of(top, logp))
            if finish is not None:
                self.end(finish)
                return True
        if output.finished:  # only its own window ends a sample before we do
            self.end(Finish.LENGTH)
        return output.finished

    def end(self, finish: Finish) -> None:
        self._tell(lambda: self.future.set_result(self.saying.end(finish)))

    def fail(self, error: Exception) -> None:
        self._tell(lambda: self.future.set_exception(error))

    def _tell(self, tell: Callable[[], None]) -> None:
        self.is_over = True
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self.loop.call_soon_threadsafe(lambda: None if self.future.done() else tell())


class _Score:
    """Log-probs of given tokens: the last of a prompt, or the one that might be drawn next."""

    def __init__(self, tokens: list[int], deadline: float, *, is_drawn: bool = False) -> None:
        self.tokens, self.deadline, self.is_drawn = tokens, deadline, is_drawn
        self.future: Future[list[float]] = Future()

    def start(self, version: int) -> None:
        pass

    def take(self, output: Any) -> bool:
        if output.finished:
            tables = output.outputs[0].logprobs if self.is_drawn else output.prompt_logprobs
            last = tables[-len(self.tokens) :]
            pairs = zip(self.tokens, last, strict=True)
            self.future.set_result([table[token].logprob for token, table in pairs])
        return output.finished

    def end(self, finish: Finish) -> None:
        self.fail(EngineError(f"engine 'vllm' gave a score up ({finish})"))

    def fail(self, error: Exception) -> None:
        self.future.set_exception(error)

    def result(self) -> list[float]:
        try:
            return self.future.result(self.deadline)
        except TimeoutError:
            raise EngineError(
                f"engine 'vllm' took more than {self.deadline:g} s to score"
            ) from None


def _arguments(args: Mapping[str, Any], folder: Path, has_weights: bool) -> dict[str, Any]:
    refused = sorted(set(args) & set(OURS))
    if refused:
        raise EngineError(
            f"engine.args cannot set {', '.join(refused)} of vLLM: graft decides on them"
        )
    many = [f"{name}={args[name]}" for name in FOR_ONE if args.get(name, 1) != 1]
    if many:
        raise EngineError(
            f"engine.args {', '.join(many)}: vLLM in this process runs on one device. Start servers "
            "(vllm serve) and name them in engine.url"
        )
    return {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # its own defaults, not the model's top-p
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": TOP_K,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        **({} if has_weights else {"load_format": "dummy"}),
        **args,
    }


def _start(wanted: dict[str, Any]) -> Any:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise EngineError(
            f"vLLM in this process cannot live beside {dist.get_world_size()} processes that train "
            "together: start servers (vllm serve) and name them in engine.url"
        )
    # read when vLLM is imported or an engine is made; the environment may say otherwise
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the cores are the learner's too
    level = os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR").upper()  # the screen is the run's
    with suppress(ValueError):  # some of its modules speak before it has read the level
        logging.getLogger("vllm").setLevel(level)
    before = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # else weights would have to be sent
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its own code, which is not ours to mend
            vllm = import_module("vllm")
            platform = import_module("vllm.platforms").current_platform
            if platform.is_cpu():  # compiling takes minutes there and saves little
                wanted = {"enforce_eager": True, **wanted}
                if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
                    wanted = {"kv_cache_memory_bytes": CPU_CACHE, **wanted}
            return vllm.LLMEngine.from_engine_args(vllm.EngineArgs(**wanted))
    except ImportError as error:
        raise EngineError(
            f"engine 'vllm' needs the vllm package ({error}): pip install \"graft-rl[vllm]\""
        ) from None
    except TypeError as error:
        raise EngineError(f"engine.args: vLLM does not take them: {error}") from None
    except Exception as error:
        raise EngineError(f"vLLM did not start: {type(error).__name__}: {error}") from error
    finally:
        if before is None:
            del os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"]
        else:
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = before


def _stop(llm: Any) -> None:
    llm.engine_core.shutdown()
    import_module("vllm.distributed").cleanup_dist_env_and_memory()


# On a CPU vLLM multiplies with packed weights, and forgets to pack some of them anew on reload.


def _forget_experts(model: Any) -> None:
    """Experts are packed by whoever makes their kernel: let it be made again."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _repack(model: Any) -> None:
    """The copy of a head that is the embedding."""
    for module in model.modules():
        if hasattr(module, "cpu_linear") and module.weight.numel():
            module.quant_method.process_weights_after_loading(module)
