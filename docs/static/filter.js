// A box that filters the rows of a page's tables, where the page asks for one.
document.addEventListener("DOMContentLoaded", () => {
  const place = document.querySelector(".filter");
  if (!place) return;
  const rows = [...document.querySelectorAll("article tbody tr")].filter(
    (row) => place.compareDocumentPosition(row) & Node.DOCUMENT_POSITION_FOLLOWING,
  );
  const box = place.querySelector("input");
  const told = place.querySelector("output");
  const filter = () => {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
      shown += !row.hidden;
    }
    told.textContent = words.length ? `${shown} of ${rows.length} rows` : "";
  };
  place.hidden = false;
  box.value = new URLSearchParams(location.search).get("q") || "";
  box.addEventListener("input", filter);
  filter();
});
