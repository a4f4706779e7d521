# The package with a job that misbehaves, for docker-compose.yml.
FROM python:3.11.13-slim-bookworm

RUN groupadd --gid 1000 job && useradd --uid 1000 --gid job --create-home job \
    && install -d -o job -g job /var/log/job

WORKDIR /app
COPY constraints.txt ./
# The CPU's torch is a tenth of the size of the one with CUDA.
RUN pip install --no-cache-dir --constraint constraints.txt \
    --index-url https://download.pytorch.org/whl/cpu \
    --extra-index-url https://pypi.org/simple torch numpy
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
COPY dashboards ./dashboards
RUN pip install --no-cache-dir --constraint constraints.txt ".[otlp]"
COPY deploy/job ./job

USER job
CMD ["python", "-c", "import tracedstore; print(tracedstore.__version__)"]
