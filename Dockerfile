# A builder without a GPU that warms up, packs and proves; a runtime without a compiler that launches what was packed.
#
#   docker build -t my-service .
#   docker run --rm --read-only --user 12345 my-service tcache verify /opt/tcache/bundle --root /app
#   docker run --rm --read-only --user 12345 --gpus all -p 8000:8000 my-service
ARG PYTHON=python:3.11-slim

FROM ${PYTHON} AS builder
# python3-dev only where the base has no Python.h: native helpers are built here, and nowhere else
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && if [ ! -e "$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ]; then \
         apt-get install --yes --no-install-recommends python3-dev; fi \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /app
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY tcache tcache
COPY examples/requirements.txt examples/requirements.txt
RUN python3 -m venv /opt/venv \
    && /opt/venv/bin/pip install --no-cache-dir --constraint constraints.txt --requirement examples/requirements.txt .
COPY kernels kernels
COPY shape_manifests shape_manifests
COPY best_configs best_configs
RUN /opt/venv/bin/tcache warmup shape_manifests/quickstart.yaml --cache-dir /cache \
    && /opt/venv/bin/tcache pack shape_manifests/quickstart.yaml --cache-dir /cache --output /opt/tcache/bundle \
    && /opt/venv/bin/tcache verify /opt/tcache/bundle

FROM ${PYTHON}
# python:*-slim ships headers; nothing here may compile
RUN rm -rf /usr/local/include/python3* /usr/include/python3*
COPY --from=builder /opt/venv /opt/venv
COPY --from=builder /opt/tcache/bundle /opt/tcache/bundle
WORKDIR /app
COPY kernels kernels
COPY shape_manifests shape_manifests
COPY examples/serve.py serve.py
# under a read-only root /tmp cannot be written; /dev/shm is memory, and Triton may ask for a moment's scratch space
ENV PATH=/opt/venv/bin:$PATH \
    TMPDIR=/dev/shm \
    PYTHONDONTWRITEBYTECODE=1 \
    TCACHE_BUNDLES=/opt/tcache/bundle \
    TCACHE_MODE=frozen \
    TRITON_CACHE_MANAGER=tcache.overlay:OverlayCacheManager \
    HOST=0.0.0.0 \
    PORT=8000
EXPOSE 8000
# any uid will do: none is in /etc/passwd, none has a home
USER 10001
CMD ["python3", "serve.py"]
