"""docs/benchmarks/gpu.md: the programs know the options on the page; tests/gpu_benchmarks runs them."""

from tests.docs.excerpts import Excerpts, shell
from tests.docs.pages import ROOT

page = Excerpts("docs/benchmarks/gpu.md")
for line in page.text("bash").splitlines():
    if line.startswith("#"):
        continue
    program, *words = line.split("&&")[0].split()[1:]
    known = shell(f"cd {ROOT} && python {program} --help")
    assert all(word in known for word in words if word.startswith("--")), line
page.end()
