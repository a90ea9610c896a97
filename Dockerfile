#   docker build --target cpu -t areal_lite:cpu .
#   docker build --target gpu -t areal_lite:gpu .
# The layer of the dependencies needs pyproject.toml and constraints.txt only. The code comes last, so
# that a change of it rebuilds in seconds.
ARG CPU_BASE=python:3.11.7-slim-bookworm
ARG GPU_BASE=lmsysorg/sglang:v0.5.21

FROM ${CPU_BASE} AS cpu-dependencies
# torch and SGLang compile small kernels at run time. The packages have no pinned versions because
# Debian's archive keeps only the newest ones of a release.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc g++ libnuma1 \
    && rm -rf /var/lib/apt/lists/*
ENV PIP_NO_CACHE_DIR=1 PIP_BREAK_SYSTEM_PACKAGES=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /opt/areal_lite
COPY pyproject.toml constraints.txt LICENSE ./
COPY examples/setup.sh examples/
# As examples/setup.sh installs without a GPU: torch's CPU build where its index answers, the versions
# that the tests ran with, SGLang without its CUDA kernels. The install is editable: the code is
# copied later. --build-arg AREAL_LITE_TORCH_INDEX=… names another index of CPU builds of torch.
ARG AREAL_LITE_TORCH_INDEX=""
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
RUN mkdir -p areal_lite conf examples/quickstart/areal_lite_quickstart \
    && touch README.md areal_lite/__init__.py \
    && source examples/setup.sh && areal_lite_install "$PWD" cpu

FROM ${GPU_BASE} AS gpu-dependencies
ENV PIP_NO_CACHE_DIR=1 PIP_BREAK_SYSTEM_PACKAGES=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /opt/areal_lite
COPY pyproject.toml constraints.txt LICENSE ./
# torch, transformers and SGLang stay the base image's. pip adds the other dependencies, and fails if
# one of them wants another version of these or of what they compute with. A package that the base
# image lacks gets the version that the tests ran with. Of the dependencies only megatron-core asks
# for torch, whose own pins the base image may break on purpose (a newer NCCL), so it comes without
# its dependencies: torch, numpy and packaging.
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
RUN mkdir -p areal_lite conf examples/quickstart/areal_lite_quickstart \
    && touch README.md areal_lite/__init__.py \
    && python3 -c "import tomllib; \
        project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
        other = ('torch=', 'transformers=', 'megatron-core='); \
        print(*[item for item in project['dependencies'] if not item.startswith(other)], sep='\n')" \
        > /tmp/wanted \
    && python3 -m pip list --format=freeze --exclude-editable \
        | grep -E '^(torch|transformers|sglang|triton|nvidia|cuda|flash|numpy)' > /tmp/kept \
    && python3 -m pip list --format=freeze \
        | awk -F== '{ name = tolower($1); gsub(/[-_.]+/, "-", name) } \
            FILENAME == "-" { here[name]; next } NF == 2 && !(name in here)' - constraints.txt \
        > /tmp/added \
    && python3 -m pip install -r /tmp/wanted packaging -c /tmp/kept -c /tmp/added \
    && python3 -m pip install --no-deps -e . "$(grep -o 'megatron-core==[0-9.]*' pyproject.toml)" \
    && rm /tmp/wanted /tmp/kept /tmp/added

FROM cpu-dependencies AS cpu
RUN useradd --uid 10001 --create-home areal \
    && mkdir /runs /models && chown areal /runs /models
COPY conf conf
COPY areal_lite areal_lite
COPY examples/quickstart examples/quickstart
USER 10001
WORKDIR /runs
ENV PYTHONUNBUFFERED=1 HF_HOME=/models/cache RUN_DIR=/runs/run
HEALTHCHECK --interval=30s --timeout=15s --start-period=15m --retries=3 \
    CMD ["sh", "-c", "python3 -m areal_lite.launch.prepare health \"$RUN_DIR\""]
ENTRYPOINT ["python3", "-m", "areal_lite"]
CMD ["--help"]

FROM gpu-dependencies AS gpu
RUN useradd --uid 10001 --create-home areal \
    && mkdir /runs /models /kernels && chown areal /runs /models /kernels
COPY conf conf
COPY areal_lite areal_lite
COPY examples/quickstart examples/quickstart
USER 10001
# SGLang may be an editable install of the base image: this user must be able to read it.
RUN python3 -c "from importlib.util import find_spec as find; assert find('sglang') and find('torch')"
WORKDIR /runs
# Kernels are compiled at the first start, for minutes. The volume keeps them.
VOLUME /kernels
ENV PYTHONUNBUFFERED=1 HF_HOME=/models/cache RUN_DIR=/runs/run XDG_CACHE_HOME=/kernels \
    SGLANG_CACHE_DIR=/kernels SGLANG_JIT_CACHE_DIR=/kernels/jit TRITON_CACHE_DIR=/kernels/triton
HEALTHCHECK --interval=30s --timeout=15s --start-period=15m --retries=3 \
    CMD ["sh", "-c", "python3 -m areal_lite.launch.prepare health \"$RUN_DIR\""]
ENTRYPOINT ["python3", "-m", "areal_lite"]
CMD ["--help"]
