// pymdownx.arithmatex writes \(...\) into spans and \[...\] into divisions.
for (const element of document.querySelectorAll(".arithmatex")) {
  katex.render(element.textContent.trim().slice(2, -2), element, {displayMode: element.tagName === "DIV", throwOnError: false});
}
