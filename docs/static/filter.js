// A box that filters the rows of a page's tables, where the page asks for one.
document.addEventListener("DOMContentLoaded", () => {
  const place = document.querySelector(".filter");
  if (!place) return;
  const tables = [...document.querySelectorAll("article details table")];
  const rows = tables.flatMap((table) => [...table.tBodies[0].rows]);
  const box = place.querySelector("input");
  const told = place.querySelector("output");
  const filter = () => {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
    for (const table of tables) {
      table.hidden = [...table.tBodies[0].rows].every((row) => row.hidden);
      table.closest("details").open = words.length > 0 && !table.hidden;
    }
    place.parentElement.classList.toggle("filtering", words.length > 0);
    const shown = rows.filter((row) => !row.hidden).length;
    told.textContent = words.length ? `${shown} of ${rows.length} rows` : "";
  };
  place.hidden = false;
  box.value = new URLSearchParams(location.search).get("q") || "";
  box.addEventListener("input", filter);
  filter();
});
