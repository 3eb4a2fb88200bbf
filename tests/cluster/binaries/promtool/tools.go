//go:build tools

// Package tools names the commands that the tests build from this module's pinned dependencies.
package tools

import (
	_ "github.com/prometheus/prometheus/cmd/promtool"
)
