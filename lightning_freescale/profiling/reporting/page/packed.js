// Content that the writer has packed into the page: gzip in base64.

async function unpacked(place) {
  const text = atob(place.textContent.trim()), bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i += 1) bytes[i] = text.charCodeAt(i);
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip")));
}

// Integers of 8 bytes. The page has all first bytes, then all second bytes, and so on, which compresses well.
function planes(buffer) {
  const bytes = new Uint8Array(buffer), count = bytes.length / 8, found = new Float64Array(count);
  const half = (i, first) => bytes[i + first * count] | bytes[i + (first + 1) * count] << 8 | bytes[i + (first + 2) * count] << 16 | bytes[i + (first + 3) * count] << 24;
  for (let i = 0; i < count; i += 1) found[i] = half(i, 4) * 2 ** 32 + (half(i, 0) >>> 0);
  return found;
}

const LIBRARY = document.getElementById("library");

// Runs Plotly's JavaScript, which the security policy allows by its hash.
async function plotly() {
  if (typeof Plotly === "undefined") document.head.append(el("script", {}, await (await unpacked(LIBRARY)).text()));
}
