"""The calls into the vLLM library; no other file imports it."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from graft.engine.errors import EngineError
from graft.engine.remote.stateless import PendingSample
from graft.engine.remote.top_entropy import TOP_K

OURS = (
    "model",
    "dtype",
    "seed",
    "max_model_len",
    "logprobs_mode",
    "skip_tokenizer_init",
    "generation_config",
)
"""Arguments of vLLM that engine.args may not change: the engine depends on them."""
PARALLEL_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
CPU_CACHE = 2**30
"""Bytes of keys and values on a CPU, where vLLM would take most of the memory."""


def engine_arguments(args: Mapping[str, Any], folder: Path, has_weights: bool) -> dict[str, Any]:
    """The arguments of vLLM's engine: those of engine.args and ours."""
    refused = sorted(set(args) & set(OURS))
    if refused:
        raise EngineError(f"engine.args cannot set {', '.join(refused)} of vLLM: graft sets them")
    parallel = [f"{name}={args[name]}" for name in PARALLEL_SIZES if args.get(name, 1) != 1]
    if parallel:
        raise EngineError(
            f"engine.args {', '.join(parallel)}: vLLM in this process runs on one device. Start servers "
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


def start_engine(arguments: dict[str, Any]) -> Any:
    """vLLM's `LLMEngine`; EngineError if it does not start."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise EngineError(
            f"vLLM in this process cannot run beside {dist.get_world_size()} processes that train "
            "together: start servers (vllm serve) and name them in engine.url"
        )
    # read when vLLM is imported or an engine is made; a value in the environment wins
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the learner uses these cores too
    # the terminal shows the run
    level = os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR").upper()
    with suppress(ValueError):  # some of its modules log before it has read the level
        logging.getLogger("vllm").setLevel(level)
    before = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING")
    # else vLLM runs in another process, and weights would be sent to it
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about its own code
            vllm = import_module("vllm")
            platform = import_module("vllm.platforms").current_platform
            if platform.is_cpu():  # compiling takes minutes there and saves little
                arguments = {"enforce_eager": True, **arguments}
                if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
                    arguments = {"kv_cache_memory_bytes": CPU_CACHE, **arguments}
            return vllm.LLMEngine.from_engine_args(vllm.EngineArgs(**arguments))
    except ImportError as error:
        raise EngineError(
            f"engine 'vllm' needs the vllm package ({error}): pip install \"graft-rl[vllm]\""
        ) from None
    except TypeError as error:
        raise EngineError(f"engine.args: vLLM refuses them: {error}") from None
    except Exception as error:
        raise EngineError(f"vLLM did not start: {type(error).__name__}: {error}") from error
    finally:
        if before is None:
            del os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"]
        else:
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = before


def stop_engine(llm: Any) -> None:
    llm.engine_core.shutdown()
    import_module("vllm.distributed").cleanup_dist_env_and_memory()


def sampling_parameters(pending: PendingSample, seed: int, top_k: int) -> Any:
    """vLLM's parameters of a sample, which streams its tokens with `top_k` log-probs each."""
    vllm, sampling = import_module("vllm"), pending.sampling
    return vllm.SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        max_tokens=pending.budget,
        min_tokens=min(sampling.min_tokens, pending.budget),
        stop_token_ids=sorted(pending.stop_tokens),
        ignore_eos=True,  # ours are among the stop tokens
        logprobs=top_k,
        seed=seed,
        detokenize=False,
        output_kind=vllm.sampling_params.RequestOutputKind.DELTA,
    )


def prompt_score_parameters() -> Any:
    """For log-probs of the prompt's tokens at temperature 1."""
    return import_module("vllm").SamplingParams(prompt_logprobs=0, **_SCORE)


def token_score_parameters(token: int, temperature: float) -> Any:
    """For the log-prob of `token` as the next one."""
    return import_module("vllm").SamplingParams(
        temperature=temperature, logprob_token_ids=[token], **_SCORE
    )


_SCORE: dict[str, Any] = {"max_tokens": 1, "detokenize": False, "ignore_eos": True}


def reload_weights(llm: Any, weights: Iterator[tuple[str, Any]]) -> None:
    """Replace the weights in memory.

    On a CPU vLLM computes with packed weights, and a reload does not pack some of them again.
    """
    is_cpu = import_module("vllm.platforms").current_platform.is_cpu()
    if is_cpu:
        llm.apply_model(_drop_expert_kernels)
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
    if is_cpu:
        llm.apply_model(_repack)


def _drop_expert_kernels(model: Any) -> None:
    """Experts are packed when their kernel is made: it is made again on the next use."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _repack(model: Any) -> None:
    """Pack again the head that is the embedding."""
    for module in model.modules():
        if hasattr(module, "cpu_linear") and module.weight.numel():
            module.quant_method.process_weights_after_loading(module)
