{{- /* A worker's pod. */ -}}

{{- /* GPUs and RDMA devices beside the other resources. Takes pool. */ -}}
{{- define "baton.workerResources" -}}
{{- $devices := dict -}}
{{- if and (gt (int .pool.gpus) 0) .pool.gpuResource }}{{- $_ := set $devices .pool.gpuResource (int .pool.gpus) }}{{- end }}
{{- if .pool.rdma.resourceName }}{{- $_ := set $devices .pool.rdma.resourceName (int .pool.rdma.count) }}{{- end }}
{{- $resources := merge (dict "limits" (merge $devices (.pool.resources.limits | default dict))) .pool.resources -}}
{{- $claims := list -}}
{{- range .pool.resourceClaims }}{{ $claims = append $claims (dict "name" .name) }}{{ end -}}
{{- if $claims }}{{ $_ := set $resources "claims" $claims }}{{ end -}}
{{- toYaml $resources -}}
{{- end -}}

{{- define "baton.workerSecurity" -}}
{{- $pinning := and .pool.rdma.resourceName .pool.rdma.ipcLock -}}
{{- include "baton.containerSecurity" (dict "root" .root "add" (ternary (list "IPC_LOCK") list (not (empty $pinning)))) -}}
{{- end -}}

{{- define "baton.workerMounts" -}}
- {name: config, mountPath: /etc/baton/config, readOnly: true}
{{ include "baton.rankMounts" . }}
{{- if gt (int .pool.nodes) 1 }}
- {name: ray, mountPath: /tmp/ray}
{{- end }}
{{- include "baton.secretMounts" . }}
{{- if include "baton.asksApi" (dict "root" .root "role" (.workers | default .component)) }}
- {name: account, mountPath: /var/run/secrets/kubernetes.io/serviceaccount, readOnly: true}
{{- end }}
{{- end -}}

{{- define "baton.workerVolumes" -}}
- {name: config, configMap: {name: {{ .configName }}}}
{{ include "baton.rankVolumes" . }}
{{- if gt (int .pool.nodes) 1 }}
- {name: ray, emptyDir: {}}
- {name: ray-tmp, emptyDir: {}}
{{- else if and (eq .root.Values.ray.mode "embedded") .root.Values.ray.joinWorkers }}
- {name: ray-tmp, emptyDir: {}}
- {name: ray-shm, emptyDir: {medium: Memory, sizeLimit: 256Mi}}
{{- end }}
{{- include "baton.secretVolumes" . }}
{{- if include "baton.asksApi" (dict "root" .root "role" (.workers | default .component)) }}
{{- /* The account's token as Kubernetes would mount it, but into the worker's container only. */}}
- name: account
  projected:
    defaultMode: 0440
    sources:
      - serviceAccountToken: {path: token, expirationSeconds: 3607}
      - configMap: {name: kube-root-ca.crt, items: [{key: ca.crt, path: ca.crt}]}
      - downwardAPI: {items: [{path: namespace, fieldRef: {fieldPath: metadata.namespace}}]}
{{- end }}
{{- end -}}

{{- /* Of a rank: it computes, and its worker alone holds secrets (worker/ranks/remote.py). */ -}}
{{- define "baton.rankMounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: shm, mountPath: /dev/shm}
{{- include "baton.modelMount" .root }}
{{- if hasPrefix "pvc://" .root.Values.model.adapters.source }}
- {name: {{ include "baton.adaptersVolume" .root }}, mountPath: /{{ include "baton.adaptersVolume" .root }}, readOnly: true}
{{- end }}
{{- with .pool.pod.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "baton.rankVolumes" -}}
- {name: tmp, emptyDir: {}}
- {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ .pool.shmSize }}}}
{{- include "baton.modelVolume" .root }}
{{- if hasPrefix "pvc://" .root.Values.model.adapters.source }}
- name: {{ include "baton.adaptersVolume" .root }}
  persistentVolumeClaim: {claimName: {{ index (splitList "/" (trimPrefix "pvc://" .root.Values.model.adapters.source)) 0 }}, readOnly: true}
{{- end }}
{{- with .pool.pod.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- /* Of a Ray node beside a worker. Code that runs in Ray must not reach the worker's files: caches of compiled code and modules
       in /tmp are executed by the process that loads them. A worker that spans pods attaches to its Ray node, by the sockets in
       /tmp/ray and the object store in /dev/shm. */ -}}
{{- define "baton.rayNodeMounts" -}}
- {name: ray-tmp, mountPath: /tmp}
{{- if gt (int .pool.nodes) 1 }}
- {name: ray, mountPath: /tmp/ray}
- {name: shm, mountPath: /dev/shm}
{{- else }}
- {name: ray-shm, mountPath: /dev/shm}
{{- end }}
{{- end -}}

{{- /* Start-up waits as long as the model needs; readiness: registered and not draining; liveness: the engine makes steps.
       /live fails only after livenessSeconds without one, so the three failures in a row allow for a busy machine and are no
       second wait for the engine. */ -}}
{{- define "baton.workerProbes" -}}
startupProbe:
  httpGet: {path: /ready, port: metrics}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ .pool.startupFailures | default (divf .root.Values.model.loadSeconds 5 | ceil) }}
readinessProbe:
  {{- if eq .pool.probe "grpc" }}
  grpc: {port: {{ .pool.port }}}
  {{- else }}
  httpGet: {path: /ready, port: metrics}
  {{- end }}
  periodSeconds: 2
  timeoutSeconds: 5
livenessProbe:
  httpGet: {path: /live, port: metrics}
  periodSeconds: 10
  timeoutSeconds: 10
  failureThreshold: 3
{{- end -}}
