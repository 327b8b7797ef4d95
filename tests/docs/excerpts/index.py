"""docs/install.md and docs/index.md."""

from tests.docs.excerpts import Excerpts

page = Excerpts("docs/install.md")
for _ in range(2):
    page.text("bash")  # installs the package: test_package.py has that
page.end()
page = Excerpts("docs/index.md")
page.text("diff")
page.end()
