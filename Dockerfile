# graft with everything that its two commands need, for a CPU or a GPU.
#
#   docker build -t graft .
#   docker run --rm -it -v "$PWD/runs:/graft/runs" graft                    # the quickstart
#   docker run --rm graft graft doctor
#   docker build -t graft:test --build-arg TARGET=setup . && docker run --rm graft:test make test
#
# With a GPU (NVIDIA's container toolkit on the host; PyPI's torch brings CUDA's libraries):
#
#   docker build -t graft:cuda --build-arg TORCH_INDEX=https://pypi.org/simple .
#   docker run --rm --gpus all --shm-size=8g -v "$PWD/runs:/graft/runs" graft:cuda
#
# Apptainer: apptainer build graft.sif docker-daemon://graft:cuda && apptainer run --nv graft.sif
# podman takes the same arguments (for a GPU: --device nvidia.com/gpu=all).

ARG BASE=debian:bookworm-slim
FROM ${BASE}

# bubblewrap is the strongest sandbox for code that a policy writes; gcc compiles Triton's launchers
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv python3-dev gcc libc6-dev make git bubblewrap ca-certificates \
    && rm -rf /var/lib/apt/lists/*

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG TARGET=install
WORKDIR /graft
COPY constraints.txt ./
# torch first, by its exact version: the build with or without CUDA, whichever the index has
RUN python3 -m venv .venv \
    && .venv/bin/pip install --no-cache-dir --index-url "${TORCH_INDEX}" --extra-index-url https://pypi.org/simple "$(grep '^torch==' constraints.txt)"
COPY . .
RUN make "${TARGET}"

ENV PATH="/graft/.venv/bin:${PATH}"
CMD ["graft", "train", "quickstart"]
