# One image for every process; the command selects it. Built in two stages, so that it contains no installer.
FROM python:3.13.14-slim AS build
WORKDIR /src
COPY requirements/bootstrap.txt requirements/runtime.txt requirements/
RUN python -m venv /opt/loraq \
    && pip install --no-cache-dir --requirement requirements/bootstrap.txt \
    && uv pip install --no-cache --python /opt/loraq/bin/python --requirement requirements/runtime.txt
COPY pyproject.toml README.md LICENSE ./
COPY schemas schemas
COPY engine engine
COPY services services
COPY migrations migrations
RUN uv pip install --no-cache --python /opt/loraq/bin/python --no-deps .

FROM python:3.13.14-slim
# The C++ kernels for the CPU and Triton's launchers are compiled at run time, into the cache.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --uid 10001 --no-create-home --home-dir /nonexistent loraq \
    && install --directory --owner=loraq /var/cache/loraq
COPY --from=build /opt/loraq /opt/loraq
ENV PATH=/opt/loraq/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    XDG_CACHE_HOME=/var/cache \
    TRITON_CACHE_DIR=/var/cache/loraq/triton \
    LORAQ_CACHE_DIR=/var/cache/loraq \
    LORAQ_HTTP_HOST=0.0.0.0 \
    LORAQ_HTTP_PORT=8080 \
    LORAQ_LOG_FORMAT=json
USER loraq
WORKDIR /var/cache/loraq
EXPOSE 8080
HEALTHCHECK --interval=10s --timeout=5s --start-period=5m --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8080/readyz', timeout=4)"]
ENTRYPOINT ["loraq"]
CMD ["--help"]
