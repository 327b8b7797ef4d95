from tests.docs.excerpts import Excerpts, made

page = Excerpts("CONTRIBUTING.md")
made(page.text("bash"))
page.end()
