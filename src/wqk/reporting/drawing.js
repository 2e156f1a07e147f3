'use strict';
/* Figures in the page's colors. */

/* No toolbar: plotly's own would offer to upload the figure. Drag to zoom, double-click to reset. */
const CONFIG = {
  displayModeBar: false,
  displaylogo: false,
  showSendToCloud: false,
  showEditInChartStudio: false,
  showLink: false,
  plotlyServerURL: '',
};

const probe = document.body.appendChild(document.createElement('i'));
probe.hidden = true;

/** A color of the stylesheet in the current theme, with an opacity. */
function color(name, opacity = 1) {
  probe.style.color = `var(--${name})`;
  const channels = getComputedStyle(probe).color.match(/[\d.]+/g).slice(0, 3);
  return `rgba(${channels.join(',')},${opacity})`;
}

function seriesColor(index, opacity) {
  return color(GROUPS[index].color, opacity);
}

/** A diverging scale through the background color. */
function diverging() {
  return ['negative-2', 'negative-1', 'zero', 'positive-1', 'positive-2']
    .map((name, i) => [i / 4, color(name)]);
}

/** A sequential scale. */
function rising() {
  return ['zero', 'accent', 'ink'].map((name, i) => [i / 2, color(name)]);
}

/** Escapes text, since plotly interprets tags and entities. */
function plain(text) {
  return String(text).replaceAll('&', '&amp;').replaceAll('<', '&lt;').replaceAll('>', '&gt;');
}

/* Models differ by color, dash and marker. Dots are reserved for the null, crosses for chance. */
const DASHES = ['solid', 'dash', 'dashdot', 'longdash', 'longdashdot'];
const SYMBOLS = ['circle', 'square', 'triangle-up', 'star', 'pentagon', 'triangle-down', 'hexagon'];

function seriesDash(index) {
  return DASHES[index % DASHES.length];
}

function seriesSymbol(index) {
  return SYMBOLS[index % SYMBOLS.length];
}

function axis(title, more = {}) {
  return {
    title: {text: title, standoff: 8},
    gridcolor: color('line'),
    zerolinecolor: color('muted'),
    linecolor: color('line'),
    automargin: true,
    ...more,
  };
}

/** An axis of layer or head numbers: about ten ticks, all of them integers. */
function wholeAxis(title, last, more = {}) {
  const step = [1, 2, 5, 10, 20, 50].find((size) => last / size <= 12) ?? 100;
  return axis(title, {dtick: step, tickangle: 0, zeroline: false, range: [-0.6, last + 0.6], ...more});
}

/** The same downwards, for the lines of a picture. */
function downwards(title, last) {
  return wholeAxis(title, last, {range: [last + 0.5, -0.5], showgrid: false});
}

function largest(rows, column) {
  return Math.max(0, ...rows.map((row) => row[column]));
}

/** From −1 to 1, or as far as the data reach. */
function scoreAxis(title, zoomed = false) {
  return axis(title, zoomed ? {} : {range: [-1.04, 1.04], dtick: 0.5});
}

function layout(x, y, more = {}) {
  return {
    xaxis: x,
    yaxis: y,
    height: 300,
    margin: {l: 44, r: 8, t: 8, b: 40},
    paper_bgcolor: 'rgba(0,0,0,0)',
    plot_bgcolor: 'rgba(0,0,0,0)',
    font: {family: 'system-ui, sans-serif', size: 12, color: color('ink')},
    hoverlabel: {
      bgcolor: color('raised'),
      bordercolor: color('line'),
      font: {color: color('ink'), size: 12},
      namelength: -1,
    },
    hovermode: 'closest',
    showlegend: false,
    ...more,
  };
}

function colorBar(title) {
  return {title: {text: title, side: 'right'}, thickness: 10, outlinewidth: 0, len: 0.9};
}

/** A color bar of layer numbers, with integers only. */
function layerBar(last) {
  return {...colorBar('layer'), tick0: 0, dtick: Math.max(1, Math.ceil(last / 6))};
}

/** Adds a captioned figure to a container for each item, and draws each in its place. */
function panels(container, items, draw) {
  while (container.children.length > items.length) {
    Plotly.purge(container.lastElementChild.querySelector('.plot'));
    container.lastElementChild.remove();
  }
  // All places first: a figure takes the width that its place has when it is drawn.
  while (container.children.length < items.length) container.append(emptyFigure());
  items.forEach((item, i) => {
    const figure = container.children[i];
    const place = figure.querySelector('.plot');
    const width = place.clientWidth;
    const drawn = draw(item, width);
    figure.querySelector('figcaption').textContent = drawn.caption;
    figure.querySelector('.said').textContent = drawn.said ?? '';
    place.setAttribute('aria-label', `Figure: ${drawn.caption}; its numbers are in the table of all rows`);
    Plotly.react(place, drawn.traces, {...drawn.layout, width}, CONFIG);
    place.removeAllListeners('plotly_click');
    place.classList.toggle('clickable', drawn.clicked !== undefined);
    if (drawn.clicked) place.on('plotly_click', ({points}) => drawn.clicked(points[0]));
  });
}

function emptyFigure() {
  const figure = document.createElement('figure');
  const plot = document.createElement('div');
  plot.className = 'plot';
  plot.setAttribute('role', 'img');
  const said = document.createElement('p');
  said.className = 'said';
  figure.append(document.createElement('figcaption'), plot, said);
  return figure;
}

/** A shaded band between two curves. */
function band(x, low, high, fill) {
  const there = x.map((_, i) => i).filter((i) => low[i] !== null && high[i] !== null);
  const back = there.toReversed();
  return {
    x: [...there, ...back].map((i) => x[i]),
    y: [...there.map((i) => high[i]), ...back.map((i) => low[i])],
    fill: 'toself',
    fillcolor: fill,
    line: {width: 0},
    mode: 'lines',
    hoverinfo: 'skip',
    showlegend: false,
  };
}
