// Before the first paint, so that a page does not flash in the other theme.
(() => {
  const kept = localStorage.getItem("ratchet-theme");
  const wanted = kept || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  document.documentElement.dataset.theme = wanted;
})();
