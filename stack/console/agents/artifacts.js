// Artifacts: the files that the turns of a session have made, as links, pictures among them to look at.

import { apiPath, saveBlob } from "../api.js";
import { bytes } from "../format.js";
import { Icon } from "../parts/icons.js";
import { html, useEffect, useRef, useState } from "../vendor/preact.js";
import { read, readBlob } from "./api.js";

/** Kinds of pictures that only show; an SVG could do more. */
const PICTURES = { png: "image/png", jpg: "image/jpeg", jpeg: "image/jpeg", gif: "image/gif", webp: "image/webp" };
const MOST_PICTURE_BYTES = 10 * 1024 ** 2;
const LISTED = 100;

/** The newest artifacts by their turns, read again whenever `version` changes; none where the server has none. */
export function useArtifacts(sessionId, version, isOffered) {
  const [byTurn, setByTurn] = useState(new Map());
  const isRefused = useRef(false);
  useEffect(() => {
    if (!isOffered || isRefused.current) return undefined;
    const stops = new AbortController();
    read(apiPath`agents/sessions/${sessionId}/artifacts`, { limit: LISTED }, stops.signal).then(
      ({ data }) => setByTurn(Map.groupBy(data.reverse(), ({ turn_id: id }) => id)),
      ({ status }) => (isRefused.current = status === 400 || status === 404),
    );
    return () => stops.abort();
  }, [sessionId, version, isOffered]);
  return byTurn;
}

export const Artifacts = ({ list }) =>
  html`<section class="artifacts" aria-label="Artifacts">${list.map((artifact) => html`<${Artifact} key=${artifact.id} artifact=${artifact} />`)}</section>`;

const pathOf = ({ session_id: session, id }) => apiPath`agents/sessions/${session}/artifacts/${id}/content`;
const nameOf = ({ path }) => path.split("/").at(-1) || path;

function Artifact({ artifact }) {
  const [error, setError] = useState(null);
  const name = nameOf(artifact);
  const kind = PICTURES[name.split(".").at(-1).toLowerCase()];
  const save = () => readBlob(pathOf(artifact)).then((blob) => saveBlob(blob, name), setError);
  return html`<figure class="artifact">
    ${kind && artifact.size_bytes <= MOST_PICTURE_BYTES && html`<${Picture} artifact=${artifact} kind=${kind} name=${name} />`}
    <figcaption class="file-card"><${Icon} name="files" /><span class="clip" title=${artifact.path}>${name}</span><span class="quiet small tabular">${bytes(artifact.size_bytes)}</span>
      ${error ? html`<span class="bad small" role="alert">${error.message}</span>` : html`<button type="button" class="plain" aria-label="Download ${name}" onClick=${save}>Download</button>`}</figcaption>
  </figure>`;
}

function Picture({ artifact, kind, name }) {
  const [url, setUrl] = useState("");
  useEffect(() => {
    let made = "";
    let isWanted = true;
    readBlob(pathOf(artifact)).then(
      (blob) => {
        if (!isWanted) return;
        made = URL.createObjectURL(new Blob([blob], { type: kind }));
        setUrl(made);
      },
      () => {},
    );
    return () => {
      isWanted = false;
      if (made) URL.revokeObjectURL(made);
    };
  }, [artifact.id]);
  return url && html`<img class="attached" src=${url} alt=${name} />`;
}
