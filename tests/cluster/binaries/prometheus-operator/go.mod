// Read for the CustomResourceDefinitions in it; nothing of it is built, so that `go mod tidy` would drop it.
module populora.dev/tests/cluster/binaries/prometheus-operator

go 1.26.0

require github.com/prometheus-operator/prometheus-operator v0.85.0
