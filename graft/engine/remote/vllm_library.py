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
    "distributed_executor_backend",
)
"""Arguments of vLLM that engine.args may not change: the engine depends on them."""
PARALLEL_SIZES = ("pipeline_parallel_size", "data_parallel_size")
CPU_CACHE = 2**30
"""Bytes of keys and values on a CPU, where vLLM would take most of the memory."""
GPU_SHARE = 0.4
"""Share of a GPU's memory for vLLM, where it would take most of it: the learner is there already."""
DISCARD = 2
"""vLLM's level of sleep that keeps neither weights nor keys and values."""


def engine_arguments(
    args: Mapping[str, Any], folder: Path, has_weights: bool, tp: int = 1
) -> dict[str, Any]:
    """The arguments of vLLM's engine: those of engine.args and ours. `tp` processes hold it together."""
    refused = sorted(set(args) & set(OURS))
    if refused:
        raise EngineError(f"engine.args cannot set {', '.join(refused)} of vLLM: graft sets them")
    parallel = [f"{name}={args[name]}" for name in PARALLEL_SIZES if args.get(name, 1) != 1]
    if parallel:
        raise EngineError(
            f"engine.args {', '.join(parallel)}: in the processes of a run vLLM splits layers only "
            "(engine.tp), and each group of processes has an engine of its own. Leave it out, or start "
            "servers (vllm serve) and name them in engine.url"
        )
    if args.get("tensor_parallel_size", tp) != tp:
        raise EngineError(
            f"engine.args tensor_parallel_size={args['tensor_parallel_size']}: this engine is held by "
            f"{tp} process{'es' if tp > 1 else ''}; start as many with torchrun and set engine.tp, or "
            "start servers (vllm serve) and name them in engine.url"
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
        "tensor_parallel_size": tp,
    }


def start_engine(arguments: dict[str, Any]) -> Any:
    """vLLM's `LLMEngine`; EngineError if it does not start.

    Beside processes that train together vLLM uses their group, and each of them has one of its workers.
    """
    if _is_launched():
        arguments = {**arguments, "distributed_executor_backend": "external_launcher"}
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
            else:
                arguments = {
                    "gpu_memory_utilization": GPU_SHARE,
                    "enable_sleep_mode": _has_sleep(),
                    **arguments,
                }
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
    client = llm.engine_core
    if not _is_launched():
        client.shutdown()
        import_module("vllm.distributed").cleanup_dist_env_and_memory()
        return
    # the same without the end of torch's process group, which the run still needs
    if (at_exit := getattr(client, "_finalizer", None)) is not None:
        at_exit.detach()
    client.engine_core.model_executor.shutdown()
    import_module("vllm.distributed").destroy_model_parallel()


def _is_launched() -> bool:
    """Whether torchrun started this process and the run has connected it to the others."""
    import torch.distributed as dist

    return "RANK" in os.environ and dist.is_available() and dist.is_initialized()


def _has_sleep() -> bool:
    """Whether this build of vLLM can give memory back and take it again."""
    return bool(import_module("vllm.device_allocator.cumem").cumem_available)


def can_sleep(llm: Any) -> bool:
    """Whether vLLM can give the memory of weights and KV cache back: on a GPU, unless
    engine.args says enable_sleep_mode: false."""
    return bool(llm.vllm_config.model_config.enable_sleep_mode)


def sleep(llm: Any) -> None:
    """Give the memory of weights, keys and values back; `wake` and new weights undo it."""
    llm.sleep(level=DISCARD)


def wake(llm: Any, part: str) -> None:
    """Take memory again for the "weights", whose values are lost, or for the "kv_cache"."""
    import torch

    torch.cuda.empty_cache()  # what the learner's allocator keeps for its next step
    llm.wake_up(tags=[part])


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
    """The parameters for log-probs of the prompt's tokens at temperature 1."""
    return import_module("vllm").SamplingParams(prompt_logprobs=0, **_SCORE)


def token_score_parameters(token: int, temperature: float) -> Any:
    """The parameters for the log-prob of `token` as the next one."""
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
