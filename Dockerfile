# For GPUs, or with TORCH_BACKEND=cpu for the CPU alone; runs stay outside, in the folder that is mounted:
#   docker build -t study .                    docker build --build-arg TORCH_BACKEND=cpu -t study .
#   docker run --rm --gpus all --ipc=host --user "$(id -u):$(id -g)" \
#       -v "$PWD/outputs:/app/outputs" study python train.py strategy=ddp
FROM python:3.11-slim-bookworm

# A compiler for compile=true, make and git for somebody who develops inside.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential git \
    && rm -rf /var/lib/apt/lists/* \
    && python -m pip install --no-cache-dir "uv>=0.9,<1" \
    && useradd --create-home --uid 1000 user \
    && install -d -o user -g user /app \
    && install -d -m 777 /app/outputs /app/.cache

USER 1000:1000
WORKDIR /app
# A host's user, who has no home here, can run it as well.
ENV VENV=/home/user/venv VIRTUAL_ENV=/home/user/venv PATH=/home/user/venv/bin:$PATH \
    UV_LINK_MODE=copy UV_CACHE_DIR=/home/user/.cache/uv \
    USER=user XDG_CACHE_HOME=/tmp/cache MPLCONFIGDIR=/tmp/matplotlib \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

COPY --chown=user . .
ARG TORCH_BACKEND=""
RUN --mount=type=cache,target=/home/user/.cache/uv,uid=1000,gid=1000 \
    uv venv --seed "$VENV" && touch "$VENV/made" \
    && uv pip install ${TORCH_BACKEND:+--torch-backend="$TORCH_BACKEND"} -c requirements.lock -e . \
    && touch "$VENV/installed"

CMD ["python", "train.py"]
