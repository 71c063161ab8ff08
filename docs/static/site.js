// A link to a function opens the list of its parameters.
function openTarget() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const entry = target && target.closest("dl");
  const details = entry && entry.querySelector(":scope > dd > details");
  if (details) details.open = true;
}
addEventListener("hashchange", openTarget);
addEventListener("DOMContentLoaded", openTarget);

// On a small screen a figure is small: a click shows it by itself.
addEventListener("DOMContentLoaded", () => document.querySelectorAll(".cell_output img").forEach(img =>
  img.addEventListener("click", () => { location.href = img.src; })));
