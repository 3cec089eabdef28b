{{- /* Parts of pods that every component shares. */ -}}

{{- /* Takes root. */ -}}
{{- define "baton.podSecurity" -}}
{{- if kindIs "map" .root.Values.podSecurityContext -}}
{{- toYaml .root.Values.podSecurityContext -}}
{{- else -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}
{{- end -}}

{{- /* Takes root; add: capabilities to keep. */ -}}
{{- define "baton.containerSecurity" -}}
{{- $security := dict "allowPrivilegeEscalation" false "readOnlyRootFilesystem" true "capabilities" (dict "drop" (list "ALL")) -}}
{{- if kindIs "map" .root.Values.securityContext }}{{ $security = deepCopy .root.Values.securityContext }}{{ end -}}
{{- with .add }}
{{- $capabilities := $security.capabilities | default dict }}
{{- $_ := set $security "capabilities" (merge (dict "add" (concat ($capabilities.add | default list) . | uniq)) $capabilities) }}
{{- end -}}
{{- toYaml $security -}}
{{- end -}}

{{- /* metadata of a pod. Takes root, component, pod, checksum (what must roll it when it changes). */ -}}
{{- define "baton.podMetadata" -}}
labels: {{- include "baton.selector" . | nindent 2 }}
  {{- with merge (dict) .pod.labels .root.Values.commonLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
annotations:
  checksum/config: {{ .checksum | sha256sum }}
  {{- with merge (dict) .pod.annotations .root.Values.commonAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{- /* Where and how a pod runs. Takes root, component, pod. */ -}}
{{- define "baton.podFields" -}}
securityContext: {{- include "baton.podSecurity" . | nindent 2 }}
enableServiceLinks: false
{{- include "baton.pullSecrets" .root }}
{{- with .pod.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .pod.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .pod.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
topologySpreadConstraints:
{{- if .pod.topologySpreadConstraints }}
{{- toYaml .pod.topologySpreadConstraints | nindent 2 }}
{{- else }}
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "baton.selector" . | nindent 8 }}
{{- end }}
{{- with .pod.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .pod.schedulerName }}
schedulerName: {{ . }}
{{- end }}
{{- with .pod.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with (.pool | default dict).resourceClaims }}
resourceClaims: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "baton.modelVolume" -}}
{{- $scheme := include "baton.modelScheme" . -}}
{{- $claim := .Values.model.huggingFace.cacheClaim -}}
{{- if eq $scheme "pvc" }}
- name: {{ include "baton.modelsVolume" . }}
  persistentVolumeClaim: {claimName: {{ index (splitList "/" (trimPrefix "pvc://" .Values.model.source)) 0 }}, readOnly: true}
{{- else if and (eq $scheme "hf") $claim }}
- name: {{ include "baton.modelsVolume" . }}
  persistentVolumeClaim: {claimName: {{ $claim }}}
{{- else if eq $scheme "hf" }}
- name: {{ include "baton.modelsVolume" . }}
  emptyDir: {sizeLimit: {{ .Values.model.huggingFace.sizeLimit }}}
{{- else if eq $scheme "s3" }}
- name: {{ include "baton.modelsVolume" . }}
  emptyDir: {sizeLimit: {{ .Values.model.s3.sizeLimit }}}
{{- end }}
{{- end -}}

{{- define "baton.modelMount" -}}
{{- if ne (include "baton.modelScheme" .) "file" }}
- {name: {{ include "baton.modelsVolume" . }}, mountPath: /{{ include "baton.modelsVolume" . }}, readOnly: true}
{{- end }}
{{- end -}}

{{- /* Whether an init container brings the model. */ -}}
{{- define "baton.modelIsFetched" -}}{{ if has (include "baton.modelScheme" .) (list "hf" "s3") }}true{{ end }}{{- end -}}

{{- /* The account of a pod that has none of its own, where a cloud's identity stands for a Secret: it is the workers', which has
       `rbac.annotations`. No token of Kubernetes' comes with it. Takes roots. */ -}}
{{- define "baton.storeAccount" -}}
{{- range .roots }}
{{- if and (eq (include "baton.modelScheme" .) "s3") (not .Values.model.s3.credentialsSecret) }}
serviceAccountName: {{ include "baton.workerAccount" . }}
{{- break }}
{{- end }}
{{- end }}
{{- end -}}

{{- /* Downloads the model, or finds it there with the right hashes, with the environment and mounts that its component got for a
       proxy or an authority of yours. Takes root, image, pod, without (router: no weights). */ -}}
{{- define "baton.modelFetch" -}}
{{- if eq (include "baton.modelScheme" .root) "hf" }}
{{- $hub := .root.Values.model.huggingFace }}
- name: fetch{{ with .root.key }}-{{ . }}{{ end }}
  image: {{ .image }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command: [baton, fetch, {{ .root.Values.model.source | quote }}, --out, {{ include "baton.modelPath" .root | quote }}, --endpoint, {{ $hub.endpoint | quote }}]
  args:
    {{- /* Without progress: bytes may come for any time, and start-up probes begin after them. */}}
    - --seconds={{ .root.Values.model.loadSeconds }}
    {{- if .without }}
    - --without-weights
    {{- end }}
    {{- if and $hub.sha256 (not .without) }}
    - --sha256={{ $hub.sha256 }}
    {{- end }}
  env:
    {{- if $hub.tokenSecret.name }}
    - name: HF_TOKEN
      valueFrom: {{- include "baton.secretKey" (dict "root" .root "reference" $hub.tokenSecret) | nindent 8 }}
    {{- end }}
    {{- include "baton.scratchEnv" .root | nindent 4 }}
    {{- with .pod.extraEnv }}{{ toYaml . | nindent 4 }}{{ end }}
  {{- with .pod.extraEnvFrom }}
  envFrom: {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext: {{- include "baton.containerSecurity" (dict "root" .root) | nindent 4 }}
  resources:
    requests: {cpu: 500m, memory: 256Mi}
    limits: {memory: 1Gi}
  volumeMounts:
    - {name: {{ include "baton.modelsVolume" .root }}, mountPath: /{{ include "baton.modelsVolume" .root }}}
    - {name: tmp, mountPath: /tmp}
    {{- with .pod.extraVolumeMounts }}{{ toYaml . | nindent 4 }}{{ end }}
{{- else if eq (include "baton.modelScheme" .root) "s3" }}
{{- include "baton.modelCopy" . }}
{{- end }}
{{- end -}}

{{- /* Copies the model from an object store. A file gets its name when it is complete, and one that is there is not copied again. */ -}}
{{- define "baton.modelCopy" -}}
{{- $store := .root.Values.model.s3 -}}
{{- $kinds := ternary "json,jinja,txt,model" "json,jinja,txt,model,safetensors" (not (empty .without)) }}
- name: fetch{{ with .root.key }}-{{ . }}{{ end }}
  image: {{ include "baton.rcloneImage" .root }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  {{- /* Without a check an empty folder would be copied with success. */}}
  command:
    - sh
    - -ec
    - rclone copy "$@"; test -f "$2/config.json" || { echo "no config.json in $1" >&2; exit 1; }
    - sh
    - {{ printf "store:%s" (trimPrefix "s3://" .root.Values.model.source) | quote }}
    - {{ include "baton.modelPath" .root }}
  args:
    - --include=*.{{ printf "{%s}" $kinds }}
    - --max-depth=1
    - --checksum
    - --transfers=8
    - --retries=4
    - --stats-one-line
    - --stats=10s
    - --stats-log-level=NOTICE
    {{- /* Of silence, after which it tries again. A limit of the whole copy would begin large files anew at each restart. */}}
    - --timeout=60s
    - --config=/tmp/rclone.conf
  env:
    - {name: HOME, value: /tmp}
    - {name: RCLONE_CONFIG_STORE_TYPE, value: s3}
    - {name: RCLONE_CONFIG_STORE_PROVIDER, value: {{ $store.provider }}}
    {{- /* By the variables of the Secret, or by the identity that the cloud gives the pod or its node. */}}
    - {name: RCLONE_CONFIG_STORE_ENV_AUTH, value: "true"}
    {{- with $store.endpoint }}
    - {name: RCLONE_CONFIG_STORE_ENDPOINT, value: {{ . | quote }}}
    {{- end }}
    {{- with $store.region }}
    - {name: RCLONE_CONFIG_STORE_REGION, value: {{ . | quote }}}
    {{- end }}
    {{- with .pod.extraEnv }}{{ toYaml . | nindent 4 }}{{ end }}
  {{- $from := .pod.extraEnvFrom }}
  {{- with $store.credentialsSecret }}{{ $from = append $from (dict "secretRef" (dict "name" .)) }}{{ end }}
  {{- with $from }}
  envFrom: {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext: {{- include "baton.containerSecurity" (dict "root" .root) | nindent 4 }}
  resources:
    requests: {cpu: 500m, memory: 256Mi}
    limits: {memory: 1Gi}
  volumeMounts:
    - {name: {{ include "baton.modelsVolume" .root }}, mountPath: /{{ include "baton.modelsVolume" .root }}}
    - {name: tmp, mountPath: /tmp}
    {{- with .pod.extraVolumeMounts }}{{ toYaml . | nindent 4 }}{{ end }}
{{- end -}}

{{- /* Takes root, role (router, worker). */ -}}
{{- define "baton.secretMounts" -}}
{{- $values := .root.Values -}}
{{- if $values.tls.enabled }}
- {name: tls, mountPath: /etc/baton/tls, readOnly: true}
{{- end }}
{{- if and (not $values.redis.enabled) $values.externalRedis.tlsSecret }}
- {name: redis-tls, mountPath: /etc/baton/redis-tls, readOnly: true}
{{- end }}
{{- if and $values.externalIndex.tlsSecret (ne (.component | default "") "autoscaler") }}
- {name: index-tls, mountPath: /etc/baton/index-tls, readOnly: true}
{{- end }}
{{- if eq .role "router" }}
{{- if include "baton.apiKeysOn" .root }}
- {name: keys, mountPath: /etc/baton/keys, readOnly: true}
{{- end }}
{{- if and $values.tls.enabled $values.tls.publicSecret }}
- {name: public-tls, mountPath: /etc/baton/public-tls, readOnly: true}
{{- end }}
{{- if and $values.tls.enabled $values.tls.clientCaSecret }}
- {name: client-ca, mountPath: /etc/baton/client-ca, readOnly: true}
{{- end }}
{{- end }}
{{- end -}}

{{- define "baton.secretVolumes" -}}
{{- $values := .root.Values -}}
{{- if $values.tls.enabled }}
{{- /* The autoscaler shows no certificate: it only checks Redis's. */}}
- {name: tls, secret: {secretName: {{ include "baton.tlsSecret" . }}, defaultMode: 0440{{ if eq (.component | default "") "autoscaler" }}, items: [{key: ca.crt, path: ca.crt}]{{ end }}}}
{{- end }}
{{- if and (not $values.redis.enabled) $values.externalRedis.tlsSecret }}
- {name: redis-tls, secret: {secretName: {{ $values.externalRedis.tlsSecret }}, defaultMode: 0440}}
{{- end }}
{{- if and $values.externalIndex.tlsSecret (ne (.component | default "") "autoscaler") }}
- {name: index-tls, secret: {secretName: {{ $values.externalIndex.tlsSecret }}, defaultMode: 0440}}
{{- end }}
{{- if eq .role "router" }}
{{- if include "baton.apiKeysOn" .root }}
- {name: keys, secret: {secretName: {{ include "baton.apiKeysSecret" .root }}, defaultMode: 0440}}
{{- end }}
{{- if and $values.tls.enabled $values.tls.publicSecret }}
- {name: public-tls, secret: {secretName: {{ $values.tls.publicSecret }}, defaultMode: 0440}}
{{- end }}
{{- if and $values.tls.enabled $values.tls.clientCaSecret }}
- name: client-ca
  secret:
    secretName: {{ $values.tls.clientCaSecret }}
    defaultMode: 0440
    items: [{key: ca.crt, path: ca.crt}]
{{- end }}
{{- end }}
{{- end -}}
