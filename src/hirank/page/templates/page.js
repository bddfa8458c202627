// Draws the figures of the page. They are data in a JSON element, never code.
const figures = JSON.parse(document.getElementById("figures").textContent);
const touch = matchMedia("(pointer: coarse)").matches; // there, dragging must scroll the page
figures.forEach((figure, i) => {
  const layout = { ...figure.layout, dragmode: touch ? false : "zoom" };
  Plotly.newPlot(`plot-${i}`, figure.data, layout, { responsive: true, displayModeBar: false });
});
