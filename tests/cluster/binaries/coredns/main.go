// CoreDNS with the plugins that the tests' node uses and no other, whose clients of every cloud would be most of what
// is compiled.
package main

import (
	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"
	_ "github.com/coredns/coredns/plugin/bind"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/kubernetes"
)

func main() {
	// The order in which they are asked.
	dnsserver.Directives = []string{"bind", "errors", "kubernetes"}
	coremain.Run()
}
