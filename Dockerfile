# The package and the example job of docker-compose.yml.
FROM python:3.11.13-slim-bookworm

RUN groupadd --gid 1000 job && useradd --uid 1000 --gid job --create-home job \
    && install -d -o job -g job /var/log/job

WORKDIR /app
COPY constraints.txt ./
# pip prefers the CPU build of torch in this index, version 2.13.0+cpu, to the CUDA build
# 2.13.0 of the default index. It is a tenth of the size.
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir --constraint constraints.txt \
    --extra-index-url "$TORCH_INDEX_URL" torch numpy
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
# The wheel includes dashboards, alert rules and provisioning.
COPY dashboards ./dashboards
COPY deploy/alertmanager ./deploy/alertmanager
COPY deploy/grafana ./deploy/grafana
RUN pip install --no-cache-dir --constraint constraints.txt ".[otlp,tools]"
COPY deploy/job ./job

USER job
CMD ["python", "-c", "import tracedstore; print(tracedstore.__version__)"]
