# A builder without a GPU that warms up, packs and proves; a runtime without a compiler that launches what was packed.
ARG PYTHON=python:3.11-slim

FROM ${PYTHON} AS builder
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /app
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY tcache tcache
RUN python3 -m venv /opt/venv \
    && /opt/venv/bin/pip install --no-cache-dir --constraint constraints.txt .
COPY kernels kernels
COPY shape_manifests shape_manifests
COPY best_configs best_configs
RUN /opt/venv/bin/tcache warmup shape_manifests/quickstart.yaml --cache-dir /cache \
    && /opt/venv/bin/tcache pack shape_manifests/quickstart.yaml --cache-dir /cache --output /opt/tcache/bundle \
    && /opt/venv/bin/tcache verify /opt/tcache/bundle

FROM ${PYTHON}
COPY --from=builder /opt/venv /opt/venv
COPY --from=builder /opt/tcache/bundle /opt/tcache/bundle
WORKDIR /app
COPY kernels kernels
COPY shape_manifests shape_manifests
ENV PATH=/opt/venv/bin:$PATH \
    TCACHE_BUNDLES=/opt/tcache/bundle \
    TCACHE_MODE=frozen \
    TRITON_CACHE_MANAGER=tcache.overlay:OverlayCacheManager
USER 10001
# Replace by your service; this proves in the image itself that every launch will hit.
CMD ["tcache", "verify", "/opt/tcache/bundle", "--root", "/app"]
