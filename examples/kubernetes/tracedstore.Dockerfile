# The package without torch, for the init container of unmodified-image.yaml. Build it in
# the folder of the repository:
#   docker build --file examples/kubernetes/tracedstore.Dockerfile --tag training.example/tracedstore:1.0 .
FROM python:3.11.13-slim-bookworm AS package
WORKDIR /app
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY src ./src
COPY dashboards ./dashboards
COPY deploy/alertmanager ./deploy/alertmanager
COPY deploy/grafana ./deploy/grafana
# The dependencies of pyproject.toml but torch, which the image of the job has.
RUN pip install --no-cache-dir --constraint constraints.txt --target /package \
    opentelemetry-api opentelemetry-sdk prometheus-client structlog python-etcd \
    && pip install --no-cache-dir --no-deps --target /package .

FROM busybox:1.37.0
COPY --from=package /package /package
