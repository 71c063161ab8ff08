// A link to a function opens the list of its parameters.
function openTarget() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const entry = target && target.closest("dl");
  const details = entry && entry.querySelector(":scope > dd > details");
  if (details) details.open = true;
}
addEventListener("hashchange", openTarget);
addEventListener("DOMContentLoaded", openTarget);

// On a small screen a figure is small: a link shows it by itself.
addEventListener("DOMContentLoaded", () => document.querySelectorAll(".cell_output img").forEach(img => {
  const link = document.createElement("a");
  link.href = img.src;
  img.replaceWith(link);
  link.append(img);
}));

// Boxes that scroll show it, and by keyboard they take the focus; so do the buttons that open the two drawers of a small screen.
function focusScrollers() {
  document.querySelectorAll("article pre, .table-wrapper, .cell_output, .math-wrapper, mjx-container[display]").forEach(box => {
    const scrolls = /auto|scroll/.test(getComputedStyle(box).overflowX) && box.scrollWidth > box.clientWidth;
    box.classList.toggle("scrolls", scrolls);
    if (scrolls) box.tabIndex = 0; else box.removeAttribute("tabindex");
  });
}
addEventListener("load", () => { focusScrollers(); window.MathJax?.startup?.promise?.then(focusScrollers); });
addEventListener("resize", focusScrollers);
document.addEventListener("toggle", focusScrollers, true);

addEventListener("DOMContentLoaded", () => {
  for (const [name, text, drawer] of [["nav", "Pages", ".sidebar-drawer"], ["toc", "On this page", ".toc-drawer"]]) {
    document.querySelector(drawer)?.setAttribute("aria-label", text);
    document.querySelectorAll(`label.${name}-overlay-icon`).forEach(label => {
      const button = document.createElement("button"), box = document.getElementById(label.htmlFor);
      button.className = label.className;
      button.innerHTML = label.innerHTML;
      button.setAttribute("aria-label", text);
      button.addEventListener("click", () => { box.checked = !box.checked; });
      label.replaceWith(button);
    });
  }
});
addEventListener("keydown", event => {
  if (event.key === "Escape") document.querySelectorAll("input.sidebar-toggle").forEach(box => { box.checked = false; });
});
