"""What `tests.command_line` imports once, so that each command of a test need not."""

import torch
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
import transformers
from omegaconf import grammar_parser
from torch.utils import tensorboard

import graft.cli
import graft.cluster.supervisor
import graft.datagen.demonstrations
import graft.datagen.rejection_sampling
import graft.engine.native.cpu.runner
import graft.engine.native.engine
import graft.envs.calculator
import graft.evaluate.run
import graft.replay.replay
import graft.train.session

__all__ = ["graft", "grammar_parser", "tensorboard", "torch", "transformers"]
